"""Fragments: packing shards, and the lengths of slices and pieces."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.marks import slow

from meshpar.local_sgd.fragments import Fragments

SHAPES = {"a": (3, 5), "b": (), "c": (40,), "d": (2, 7)}


@pytest.mark.parametrize("num_fragments, num_slices", [slow(1, 1), slow(3, 2), (5, 4)])
def test_fragments_hold_every_number_once(num_fragments, num_slices):
    cut = Fragments(SHAPES, num_fragments, num_slices, replicas=2)
    rngs = np.random.default_rng(0)
    params = {
        path: jnp.asarray(rngs.normal(size=shape), jnp.float32)
        for path, shape in SHAPES.items()
    }
    packed = [cut.pack(params, f) for f in range(num_fragments)]
    vector = np.concatenate([np.asarray(x).reshape(-1) for x in params.values()])
    padded = np.pad(vector, (0, num_fragments * cut.fragment_size - len(vector)))
    np.testing.assert_array_equal(np.stack(packed).reshape(-1), padded)
    unpacked = {path: jnp.zeros(shape) for path, shape in SHAPES.items()}
    for f in range(num_fragments):
        unpacked = cut.unpack(unpacked, f, packed[f])
    for path, x in params.items():
        np.testing.assert_array_equal(unpacked[path], x)


def test_unpacking_keeps_dtypes_and_other_fragments():
    cut = Fragments({"a": (4,), "b": (4,)}, 2, 1, replicas=2)
    params = {"a": jnp.zeros(4, jnp.bfloat16), "b": jnp.zeros(4, jnp.bfloat16)}
    unpacked = cut.unpack(params, 1, jnp.ones((1, 4)))
    assert unpacked["b"].dtype == jnp.bfloat16 and (unpacked["b"] == 1).all()
    assert unpacked["a"] is params["a"]


def test_pieces_are_multiples():
    cut = Fragments(SHAPES, 2, 3, replicas=4, piece_multiple=8)
    assert cut.piece_size == 8 and cut.slice_size == 32 and cut.fragment_size == 96
