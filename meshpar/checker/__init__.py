"""Checks of any compiled jax step: its traffic, its memory, and its mistakes."""

from meshpar.checker.check import check as check
from meshpar.checker.finding import Finding as Finding
from meshpar.checker.report import Report as Report
