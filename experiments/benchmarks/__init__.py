"""Benchmarks that report ratios within one run, as machines are shared and noisy."""
