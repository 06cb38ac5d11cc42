"""Commands on any run: run, verify, explain, plan, scaling, checkpoint."""
