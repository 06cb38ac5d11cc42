"""Gradients that rings scatter: no copy of the whole is made in another order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from meshpar.collectives.transport import Rings
from meshpar.fsdp.gather import reduce_scatter_grads
from meshpar.fsdp.sharding import ManualSharding
from meshpar.jaxprs.walk import equations

N = 4


def scatter(shape, dim):
    """(function of addends [N, ...], the jaxpr that it runs)."""
    mesh = Mesh(np.array(jax.devices()[:N]), ("fsdp",))
    sharding = ManualSharding(((dim, ("fsdp",)),), (), PartitionSpec())

    def body(x):
        rings = Rings({"fsdp": (N,)})
        return reduce_scatter_grads({"w": x[0]}, {"w": sharding}, rings)["w"]

    out = PartitionSpec(*[None] * dim, "fsdp")
    run = jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("fsdp"), out_specs=out)
    return run, jax.make_jaxpr(run)(jnp.zeros((N, *shape))).jaxpr


@pytest.mark.parametrize("shape", [(8, 512), (2, 16, 512), (2, 512, 16)])
def test_rings_take_slices_of_a_late_dim_as_they_are(shape):
    dim = shape.index(512)
    run, jaxpr = scatter(shape, dim)
    large = np.prod(shape)
    moved = [
        eqn.primitive.name
        for eqn in equations(jaxpr)
        if eqn.primitive.name == "transpose" and eqn.invars[0].aval.size >= large
    ]
    assert moved == []
    x = np.random.default_rng(0).integers(-9, 9, (N, *shape)).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(run)(x), x.sum(0))
