"""Federated averaging: clients own their rows (McMahan et al., 2017)."""
