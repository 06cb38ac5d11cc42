"""Logistic regression on sparse rows, for the commands sparse and batch."""
