"""Explains and verifies programs: collectives, memory, warnings, equivalence."""

from meshpar.explain.report import Explanation as Explanation
from meshpar.explain.report import explain as explain
