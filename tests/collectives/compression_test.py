"""Wire formats: what arrives, in how many bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshpar.collectives import compression
from meshpar.errors import MeshparError

FORMATS = ["f32", "bf16", "int8", "int4", "topk:0.1", "topk:1"]
PIECE = 2048


@pytest.fixture(scope="module")
def numbers():
    return np.random.default_rng(0).normal(size=(4, 4 * PIECE)).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_what_arrives_is_the_mean_of_what_was_sent(name, numbers):
    wire = compression.make_compression(name)
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("replica",), kinds, devices=jax.devices()[:4])

    def both(x):
        mean, sent = wire.reduce(x[0], "replica")
        whole, own = wire.gather(mean, "replica")
        return mean[None], sent[None], whole[None], own[None]

    split = PartitionSpec("replica")
    run = jax.shard_map(both, mesh=mesh, in_specs=split, out_specs=split)
    mean, sent, whole, own = map(np.asarray, jax.jit(run)(numbers))
    np.testing.assert_allclose(mean.reshape(-1), sent.mean(0), atol=1e-6)
    for row in whole:
        np.testing.assert_array_equal(row, own.reshape(-1))


@pytest.mark.parametrize(
    "name, error", [("f32", 0), ("bf16", 2**-8), ("int8", 1 / 254), ("int4", 1 / 14)]
)
def test_rounding_is_half_a_step_of_the_largest_in_a_block(name, error, numbers):
    wire = compression.make_compression(name)
    encoded = wire.encode(jnp.asarray(numbers))
    arrived = np.asarray(wire.decode(encoded, numbers.shape[1]))
    assert encoded.nbytes == 4 * wire.num_bytes(numbers.shape[1])
    blocks = numbers.reshape(4, -1, 256)
    largest = np.abs(blocks).max(-1, keepdims=True)
    apart = np.abs(arrived.reshape(blocks.shape) - blocks) / largest
    assert apart.max() <= error * 1.01
    zeros = jnp.zeros((1, 256))
    assert not np.asarray(wire.decode(wire.encode(zeros), 256)).any()


def test_topk_keeps_the_largest(numbers):
    wire = compression.make_compression("topk:0.01")
    arrived = np.asarray(wire.decode(wire.encode(jnp.asarray(numbers)), 4 * PIECE))
    kept = arrived != 0
    assert (kept.sum(1) == 82).all() and (arrived[kept] == numbers[kept]).all()
    for row, ours in zip(np.abs(numbers), kept, strict=True):
        assert row[ours].min() >= row[~ours].max()


@pytest.mark.parametrize("name", ["int7", "topk", "topk:0", "topk:1.5", "f16"])
def test_unknown_formats_are_an_error(name):
    with pytest.raises(MeshparError, match="use f32, bf16, int8, int4 or topk"):
        compression.make_compression(name)
