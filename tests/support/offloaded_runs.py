"""Prints what differs between runs with and without offload, as JSON: {offload: paths}.

python tests/support/offloaded_runs.py fsdp=4,remat=full
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.tiny_models import batch, lower

from meshpar.arrays import leaves_by_path

OFFLOADS = ("optimizer", "optimizer+parameters+activations")


def trained(layout: str) -> dict[str, np.ndarray]:
    """State, metrics and evaluation after two steps, by path."""
    options = {"clip_norm": 1.0, "compute_dtype": jnp.bfloat16}
    program = lower(layout, optimizer=optax.adamw(1e-2), **options)
    state = program.init(0)
    for step in range(2):
        state, metrics = program.step(state, batch(step))
    results = state, metrics, program.evaluate(state, batch(2))
    assert program.violations() == []
    return leaves_by_path(jax.tree.map(np.asarray, results))


def main(layout: str) -> None:
    """Compares runs of one layout."""
    expected, differing = trained(layout), {}
    for offload in OFFLOADS:
        found = trained(f"{layout},offload={offload}")
        differing[offload] = [p for p, x in found.items() if (x != expected[p]).any()]
    print(json.dumps(differing))


if __name__ == "__main__":
    main(*sys.argv[1:])
