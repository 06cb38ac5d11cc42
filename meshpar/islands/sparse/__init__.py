"""Logistic regression on sparse rows: DBPG on the store, and Hogwild without locks."""
