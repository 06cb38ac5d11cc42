"""Runs: annotated models, data, recipes and the command-line programs."""
