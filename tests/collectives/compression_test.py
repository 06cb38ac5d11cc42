"""Compression: errors of the decoded numbers, and bytes of the encoded ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.marks import slow

from meshpar.collectives import make_compression
from meshpar.errors import MeshparError

NAMES = ["f32", "bf16", "int8", "int4", "topk:0.1", "topk:1"]
SHARD = 2048


@pytest.fixture(scope="module")
def numbers():
    return np.random.default_rng(0).normal(size=(4, 4 * SHARD)).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_the_mean_is_that_of_the_decoded_numbers(name, numbers):
    compression = make_compression(name)
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("replica",), kinds, devices=jax.devices()[:4])

    def both(x):
        mean, sent = compression.reduce(x[0], "replica")
        whole, own = compression.gather(mean, "replica")
        return mean[None], sent[None], whole[None], own[None]

    split = PartitionSpec("replica")
    run = jax.shard_map(both, mesh=mesh, in_specs=split, out_specs=split)
    mean, sent, whole, own = map(np.asarray, jax.jit(run)(numbers))
    np.testing.assert_allclose(mean.reshape(-1), sent.mean(0), atol=1e-6)
    for row in whole:
        np.testing.assert_array_equal(row, own.reshape(-1))


@pytest.mark.parametrize(
    "name, error",
    [("f32", 0), ("bf16", 2**-8), slow("int8", 1 / 254), ("int4", 1 / 14)],
)
def test_errors_are_half_a_step_of_the_largest_number_of_a_block(name, error, numbers):
    compression = make_compression(name)
    encoded = compression.encode(jnp.asarray(numbers))
    decoded = np.asarray(compression.decode(encoded, numbers.shape[1]))
    assert encoded.nbytes == 4 * compression.num_bytes(numbers.shape[1])
    blocks = numbers.reshape(4, -1, 256)
    largest = np.abs(blocks).max(-1, keepdims=True)
    errors = np.abs(decoded.reshape(blocks.shape) - blocks) / largest
    assert errors.max() <= error * 1.01
    zeros = jnp.zeros((1, 256))
    assert not np.asarray(compression.decode(compression.encode(zeros), 256)).any()


def test_topk_keeps_the_largest(numbers):
    compression = make_compression("topk:0.01")
    decoded = np.asarray(
        compression.decode(compression.encode(jnp.asarray(numbers)), 4 * SHARD)
    )
    sent = decoded != 0
    assert (sent.sum(1) == 82).all() and (decoded[sent] == numbers[sent]).all()
    for row, mask in zip(np.abs(numbers), sent, strict=True):
        assert row[mask].min() >= row[~mask].max()


@pytest.mark.parametrize("name", ["int7", "topk", "topk:0", "topk:1.5", "f16"])
def test_unknown_compressions_are_an_error(name):
    with pytest.raises(MeshparError, match="use f32, bf16, int8, int4 or topk"):
        make_compression(name)
