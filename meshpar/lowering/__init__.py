"""Lowerings: from a model under a layout to one SPMD program."""
