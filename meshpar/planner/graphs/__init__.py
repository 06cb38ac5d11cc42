"""Layouts of models that are no stack: an operator graph, a simulator, a search."""
