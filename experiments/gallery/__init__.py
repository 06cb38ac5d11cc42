"""Figures of published papers, computed anew: one module a paper."""
