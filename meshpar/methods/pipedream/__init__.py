"""PipeDream: asynchronous pipelines of replicated stages (Narayanan et al., 2019)."""
