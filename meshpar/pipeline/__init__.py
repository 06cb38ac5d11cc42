"""Pipelines: `spec` and `partition`, the `executor`, and runners that train with it."""
