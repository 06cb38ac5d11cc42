"""Rematerialization policies: the values that a layer's backward pass may reuse."""

from collections.abc import Callable
from typing import Any

import jax

EXPERT_ROWS = "expert_rows"
"""Name of what a device receives for its experts (`ops.experts`)."""

REMAT_POLICIES: dict[str, Callable[[], Any]] = {
    "full": lambda: jax.checkpoint_policies.nothing_saveable,
    "dots": lambda: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "experts": lambda: jax.checkpoint_policies.save_only_these_names(EXPERT_ROWS),
}
"""{value of remat=: function that makes the policy}; remat=none wraps nothing.

"experts" is "full", but saves the rows that were sent to experts, as sent.
"""


def moves_again(remat: str, name: str) -> bool:
    """Whether the backward pass moves once more what a layer was sent.

    Args:
      remat: "none" or a key of `REMAT_POLICIES`.
      name: of what was sent, by `checkpoint_name`.
    """
    return remat != "none" and not (remat == "experts" and name == EXPERT_ROWS)


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
