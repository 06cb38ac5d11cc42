"""Random search: many trials of hyperparameters (Bergstra, Bengio, 2012)."""
