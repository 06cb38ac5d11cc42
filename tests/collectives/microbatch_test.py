"""Microbatches are strided slices, and splitting a sharded batch moves nothing."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshpar.collectives import split_microbatches
from meshpar.contracts import parse_hlo


def test_microbatch_m_holds_every_mth_row():
    rows = np.arange(12).reshape(6, 2)
    split = split_microbatches({"x": jnp.asarray(rows), "y": jnp.arange(6)}, 3)
    assert split["x"].shape == (3, 2, 2) and split["y"].shape == (3, 2)
    for m in range(3):
        np.testing.assert_array_equal(split["x"][m], rows[m::3])


def test_splitting_a_sharded_batch_moves_nothing():
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
    rows = NamedSharding(mesh, PartitionSpec("data"))
    split = NamedSharding(mesh, PartitionSpec(None, "data"))
    program = jax.jit(
        lambda x: split_microbatches(x, 2), in_shardings=rows, out_shardings=split
    )
    text = program.lower(jnp.zeros((16, 3))).compile().as_text()
    assert parse_hlo(text, dict(mesh.shape)) == []
