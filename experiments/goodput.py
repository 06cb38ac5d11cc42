r"""Goodput of a run: the share of its time that went into steps that count.

    python -m experiments.goodput runs/bytes-llama

Prints where the time of every start went, and draws it. The run may still go on.
"""

from experiments.recipes import CATALOG
from meshpar.commands import goodput

if __name__ == "__main__":
    goodput.start(CATALOG)
