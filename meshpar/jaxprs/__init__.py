"""Readers of jaxprs: straight-line programs, what depends on what, equal values."""
