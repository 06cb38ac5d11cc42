"""Rematerialization policies: what the backward pass of a layer may reuse."""

from collections.abc import Callable
from typing import Any

import jax

REMAT_POLICIES: dict[str, Callable[[], Any]] = {
    "full": lambda: jax.checkpoint_policies.nothing_saveable,
    "dots": lambda: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""What the backward pass may reuse; `none` wraps nothing and saves everything."""
