"""Runs of several processes: rank, start, agreement and watchdog."""
