r"""Checks any jax step: what it moves and holds, and what is amiss, line by line.

    python -m experiments.check my_step.py:make_step --topology=v5e:4x4

The function returns (step, *arguments). Exits 0, or 1 if the step has what --assert_no
forbids, or differs from one device.
"""

import sys

from meshpar.commands import main

if __name__ == "__main__":
    sys.argv.insert(1, "check")
    main.main()
