"""Rematerialization policies: the values that a layer's backward pass may reuse."""

from collections.abc import Callable
from typing import Any

import jax

REMAT_POLICIES: dict[str, Callable[[], Any]] = {
    "full": lambda: jax.checkpoint_policies.nothing_saveable,
    "dots": lambda: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""{value of remat=: function that makes the policy}; remat=none wraps nothing."""


def wrap_remat(
    layer: Callable, remat: str, transform: Callable = jax.checkpoint, **options: Any
) -> Callable:
    """Wraps a layer as `remat=` of a layout says; "none" returns it as it is.

    Args:
      layer: the function that runs one layer.
      remat: "none" or a key of `REMAT_POLICIES`.
      transform: a checkpoint transformation that takes ``policy=``.
      **options: other options of the transformation.
    """
    if remat == "none":
        return layer
    return transform(layer, policy=REMAT_POLICIES[remat](), **options)
