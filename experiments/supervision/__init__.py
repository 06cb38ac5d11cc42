"""Supervision of a command: attempts, restarts and a lease on its processes.

It needs the standard library alone: a supervisor outlives what it starts.
"""
