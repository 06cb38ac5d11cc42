"""Flax models whose parameters and activations carry dim names."""
