"""Gradient codes: exact sums without stragglers (Tandon et al., 2017)."""
