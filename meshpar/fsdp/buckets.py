"""Buckets: small tensors that one collective moves together, up to a constant size.

Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 6.2.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from meshpar.arrays import num_bytes
from meshpar.collectives import transport
from meshpar.fsdp.sharding import ManualSharding

BUCKET_BYTES = 4 * 2**20
"""Bytes of a bucket, whole; tensors from `transport.LARGE_BYTES` on move alone."""

TILE = 16, 128
"""Rows and columns of a TPU tile of the smallest dtype.

TPUs reduce-scatter only whole tiles along rows. Other shapes become an all_reduce,
which doubles the traffic.
"""


def limits() -> tuple[int, int]:
    """The sizes that decide which tensors share a bucket, and which move alone."""
    return BUCKET_BYTES, transport.LARGE_BYTES


def make_buckets(
    tree: Mapping[str, Any], shardings: Mapping[str, ManualSharding], ways: int
) -> Iterator[list[str]]:
    """Groups the paths of tensors that move together, in order.

    Args:
      tree: {path: array or shape}; only shapes and dtypes matter.
      shardings: {path: sharding} of the same paths.
      ways: how many times larger the moved tensors are than those of `tree`.

    Yields:
      The paths of one bucket.
    """
    unfinished: dict[Any, tuple[list[str], int]] = {}
    for path, x in tree.items():
        size = num_bytes(x) * ways
        if shardings[path].alone or size >= transport.LARGE_BYTES:
            yield [path]
            continue
        automatic = shardings[path].automatic_axes
        kind = shardings[path].axes, automatic, jnp.dtype(x.dtype)
        paths, filled = unfinished.get(kind, ([], 0))
        if filled + size > BUCKET_BYTES:
            yield paths
            paths, filled = [], 0
        unfinished[kind] = [*paths, path], filled + size
    yield from (paths for paths, _ in unfinished.values())


def is_gathered_flat(
    paths: list[str], tree: Mapping[str, Any], shardings: Mapping[str, ManualSharding]
) -> bool:
    """Whether the tensors of a bucket are gathered as one array without dims.

    Where shards have to be padded (`gather_padding`), vectors are, even alone.
    """
    first = paths[0]
    pads = shardings[first].lanes > 1 and not shardings[first].alone
    return len(paths) > 1 or (pads and len(tree[first].shape) == 1)


def gather_padding(shard_size: int, lanes: int) -> int:
    """Elements to add to every device's shard of a flat array that is gathered.

    TPUs gather whole lanes of flat arrays. Others become an all_reduce, which doubles
    the traffic.

    Args:
      shard_size: elements of a shard.
      lanes: as in its `ManualSharding`.
    """
    return -shard_size % lanes


def padding(shard_size: int) -> int:
    """Elements to add to every device's shard so that it holds whole tiles."""
    tile = math.prod(TILE)
    return -shard_size % tile if shard_size >= 16 * tile else 0
