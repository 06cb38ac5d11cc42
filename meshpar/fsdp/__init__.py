"""Fully sharded data parallelism: `zero` decides when `gather` moves which tensors."""
