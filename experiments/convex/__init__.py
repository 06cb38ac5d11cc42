"""Logistic regression on sparse rows: what the commands sparse and batch train."""
