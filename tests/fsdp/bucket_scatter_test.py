"""Small gradients that are scattered together, as whole tiles of TPUs."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from meshpar.fsdp.buckets import TILE
from meshpar.fsdp.gather import reduce_scatter_grads
from meshpar.fsdp.sharding import ManualSharding
from meshpar.jaxprs.walk import equations

N = 4
SHAPES = {"up": (128 * N, 130), "down": (130, 128 * N)}
SPECS = {"up": PartitionSpec("fsdp"), "down": PartitionSpec(None, "fsdp")}


def scatter(grads):
    shardings = {
        path: ManualSharding(((dim, ("fsdp",)),), (), PartitionSpec())
        for path, dim in (("up", 0), ("down", 1))
    }
    return reduce_scatter_grads({p: x[0] for p, x in grads.items()}, shardings)


def test_a_bucket_is_scattered_as_rows_of_whole_tiles():
    mesh = Mesh(np.array(jax.devices()[:N]), ("fsdp",))
    every = PartitionSpec("fsdp")
    run = jax.shard_map(scatter, mesh=mesh, in_specs=every, out_specs=SPECS)
    rng = np.random.default_rng(0)
    grads = {
        path: rng.integers(-9, 9, (N, *shape)).astype(np.float32)
        for path, shape in SHAPES.items()
    }
    jaxpr = jax.make_jaxpr(run)(jax.tree.map(jnp.asarray, grads))
    (moved,) = (
        eqn.invars[0].aval.shape
        for eqn in equations(jaxpr.jaxpr)
        if eqn.primitive.name == "reduce_scatter"
    )
    tiles = -(-2 * 128 * 130 // np.prod(TILE))  # Padded up to whole ones.
    assert moved == (N * TILE[0], tiles * TILE[1])
    sums = jax.jit(run)(grads)
    for path, x in grads.items():
        np.testing.assert_array_equal(sums[path], x.sum(0))
