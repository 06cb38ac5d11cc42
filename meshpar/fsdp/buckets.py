"""Buckets: small tensors that travel together, up to a constant size.

Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 6.2.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from meshpar.collectives import transport
from meshpar.fsdp.sharding import ManualSharding

BUCKET_BYTES = 4 * 2**20
"""Whole size of one bucket; large tensors (`transport.LARGE_BYTES`) travel alone."""


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
        if shardings[path].alone or size >= transport.LARGE_BYTES:
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


TILE = 16, 128
"""Rows and columns of a TPU tile of the smallest dtype.

TPUs scatter along rows in whole tiles. Other shapes they reduce whole, which doubles
the traffic.
"""


def padding(shard_size: int) -> int:
    """Elements that a bucket adds to every device's part to scatter whole tiles."""
    tile = math.prod(TILE)
    return -shard_size % tile if shard_size >= 16 * tile else 0
