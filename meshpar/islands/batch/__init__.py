"""Training on whole batches: Sandblaster L-BFGS, and gradient codes."""
