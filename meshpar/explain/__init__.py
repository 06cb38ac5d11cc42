"""Explains and verifies programs: collectives, memory, warnings, equivalence."""
