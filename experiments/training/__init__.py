"""Training: the loop of a run, its metrics, progress, guards and final report."""
