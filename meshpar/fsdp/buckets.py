"""Buckets: small tensors that travel together."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from meshpar.fsdp.sharding import ManualSharding

BUCKET_BYTES = 4 * 2**20
"""Whole size of one bucket; tensors of a quarter of it or more travel alone."""


def make_buckets(
    tree: Mapping[str, Any], shardings: Mapping[str, ManualSharding], ways: int
) -> Iterator[list[str]]:
    """Groups the paths that travel together, in order.

    Args:
      tree: {path: array or shape}; only shapes and dtypes matter.
      shardings: of the same paths.
      ways: how many times larger the moved tensors are than those of `tree`.
    """
    filling: dict[Any, tuple[list[str], int]] = {}
    for path, x in tree.items():
        size = math.prod(x.shape) * jnp.dtype(x.dtype).itemsize * ways
        if shardings[path].alone or is_large(size):
            yield [path]
            continue
        automatic = shardings[path].automatic_axes
        kind = shardings[path].axes, automatic, jnp.dtype(x.dtype)
        paths, filled = filling.get(kind, ([], 0))
        if filled + size > BUCKET_BYTES:
            yield paths
            paths, filled = [], 0
        filling[kind] = [*paths, path], filled + size
    yield from (paths for paths, _ in filling.values())


def is_large(whole_bytes: int) -> bool:
    """Whether a tensor travels alone for its size."""
    return 4 * whole_bytes >= BUCKET_BYTES


TILE = 16, 128
"""Rows and columns of a TPU tile of the smallest dtype.

TPUs scatter along rows in whole tiles; what does not suit them they reduce whole, at
twice the traffic.
"""


def padding(shard_size: int) -> int:
    """Elements that a bucket adds to every device's part to scatter whole tiles."""
    tile = math.prod(TILE)
    return -shard_size % tile if shard_size >= 16 * tile else 0
