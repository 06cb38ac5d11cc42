"""Sandblaster: L-BFGS on whole batches by a coordinator (Dean et al., 2012)."""
