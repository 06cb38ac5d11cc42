"""Noise drawn shard by shard is the noise drawn at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from meshpar.collectives import shard_keys


def draw(key, rows):
    one, *others = jax.random.split(jax.random.fold_in(key, 3), 3)
    return (
        jax.random.bernoulli(one, 0.3, (rows, 5, 6)),
        jax.random.normal(others[0], (rows, 3)),
        jax.random.bits(others[1], (rows, 4), "uint8"),
    )


def test_shards_draw_rows_of_the_global_draw():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    key, data = jax.random.key(7), PartitionSpec("data")

    def shard(x):
        own = shard_keys.for_shard(key, jax.lax.axis_index("data"))
        return draw(own, len(x))

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            shard, in_specs=data, out_specs=data, axis_names={"data"}
        )
        got = jax.jit(mapped)(jnp.zeros(8))
    for shards, whole in zip(got, draw(key, 8), strict=True):
        np.testing.assert_array_equal(shards, whole)


@pytest.mark.parametrize(
    "a, b", [(5, 2**31 + 7), (70_000, 123_456_789), (2**20, 2**20), (2**32 - 1,) * 2]
)
def test_high_word_of_a_product(a, b):
    assert int(shard_keys._high_word(jnp.uint32(a), b)) == (a * b) >> 32


def test_a_draw_too_large_to_count_is_an_error():
    key = shard_keys.for_shard(jax.random.key(0), jnp.uint32(0))
    with pytest.raises(ValueError, match="2\\*\\*32"):
        jax.jit(lambda: jax.random.bits(key, (2**16, 2**16))).lower()
