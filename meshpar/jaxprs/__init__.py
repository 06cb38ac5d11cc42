"""Readers of jaxprs: interpreters, straight-line programs, value numbers, FLOPs."""
