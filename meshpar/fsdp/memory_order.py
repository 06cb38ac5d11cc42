"""Orders of dims in memory, where compilers would choose others and copy arrays."""

from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from meshpar.fsdp.buckets import TILE
from meshpar.mesh.platform import traced_platform


def in_one_order(tree: Any) -> Any:
    """A tree in an order in memory that all who write and read an array agree on.

    Each may choose its own order otherwise, and the whole array is copied from one to
    the other (`Platform.copies_to_orders`). A buffer of a pipeline is copied in every
    tick, a stack of weights once a step, and that copy is held to the end of the step.
    The last dim varies fastest, unless only another one fills whole tiles.
    """
    if not traced_platform().copies_to_orders:
        return tree
    return jax.tree.map(lambda x: with_layout_constraint(x, _order(x.shape)), tree)


def _order(shape: tuple[int, ...]) -> Layout:
    """The order of dims in memory, of which the last one varies fastest."""
    dims = list(range(len(shape)))
    full = [dim for dim in dims if shape[dim] % TILE[1] == 0]
    if full and dims[-1] not in full:
        fastest = max(full, key=shape.__getitem__)
        dims.remove(fastest)
        dims.append(fastest)
    return Layout(tuple(dims))
