"""Faults of real training runs: drawn at random, struck, and their results compared."""
