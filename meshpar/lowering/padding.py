"""Bytes of arrays, with the padding of their last dim to the lanes of a chip."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from meshpar.arrays import num_bytes
from meshpar.mesh.chips import chip_of


def lanes_of(mesh: Mesh) -> int:
    """Elements to which the devices of a mesh pad the last dim of an array."""
    chip = chip_of(mesh.devices.flat[0].device_kind)
    return chip.tile[1] if chip else 1


def tree_bytes(tree: Any, lanes: int = 1) -> int:
    """Bytes of all arrays of a tree, random keys aside.

    Args:
      tree: of arrays.
      lanes: elements to which the last dim is padded. A compiler puts another dim last
        where the padding would be more than half.
    """
    return sum(
        num_bytes(x) * _padding(x.shape, lanes)
        for x in jax.tree.leaves(tree)
        if not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    )


def _padding(shape: tuple[int, ...], lanes: int) -> int:
    """How many times its own bytes a padded array takes."""
    return 2 if len(shape) > 2 and 2 * shape[-1] == lanes else 1
