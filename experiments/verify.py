r"""Proves that a layout trains the model of a plain loop, and keeps its contract.

    python -m experiments.verify --recipe=tiny --layout="fsdp=4,tensor=2"
    python -m experiments.verify --recipe=tiny --random=20 --seed=1
    python -m experiments.verify --recipe=tiny --random=50 --optimizers

The judge is a training loop of plain jax and optax on one device, which shares nothing
with the lowerings. Prints a table and a verdict. Exits 0 if every tensor is equal
within rounding and the compiled program moves what the layout declares; otherwise exits
1 with the first tensor that differs or the collectives that are wrong. With --random,
it draws layouts, prints a line for each and exits 1 if any is wrong; with --optimizers
it draws an optimizer of optax and the weights of tokens for each of them, too.
"""

from experiments.recipes import CATALOG
from meshpar.commands import verify

if __name__ == "__main__":
    verify.start(CATALOG)
