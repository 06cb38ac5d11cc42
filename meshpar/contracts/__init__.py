"""Contracts: the collectives that a step declares, and those that its program holds."""
