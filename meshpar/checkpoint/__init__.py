"""Checkpoints that restore onto any layout and any number of processes."""
