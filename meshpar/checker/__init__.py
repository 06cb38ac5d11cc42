"""Checks of any jax step, compiled: its traffic, its memory, and what is amiss."""

from meshpar.checker.check import check as check
from meshpar.checker.finding import Finding as Finding
from meshpar.checker.report import Report as Report
