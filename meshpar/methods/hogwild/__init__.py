"""Hogwild: SGD by several processes without locks (Recht et al., 2011)."""
