"""DBPG: L1 logistic regression with sparse keys on a store (Li et al., 2014)."""
