"""Rematerialization policies: the values that a layer's backward pass may reuse."""

from collections.abc import Callable
from typing import Any

import jax

REMAT_POLICIES: dict[str, Callable[[], Any]] = {
    "full": lambda: jax.checkpoint_policies.nothing_saveable,
    "dots": lambda: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""{value of remat=: function that makes the policy}; remat=none wraps nothing."""
