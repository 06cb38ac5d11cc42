"""The weights with which a program of seed 0 starts, in a module outside of it."""

import jax
from flax import nnx

import meshpar


def start_of(make, loss):
    """Graph and variables with which a program of seed 0 starts."""
    params = meshpar.from_nnx(make, loss).init(jax.random.key(0))
    with nnx.use_eager_sharding(False):  # Dims are named, and there is no mesh.
        graph, state = nnx.split(make(nnx.Rngs(0)))
    for path, x in nnx.to_flat_state(state):
        x[...] = params["/".join(map(str, path))]
    return graph, state
