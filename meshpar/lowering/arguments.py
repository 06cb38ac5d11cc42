"""Arguments of `lower`: checks of their kinds and ranges, before anything is traced."""

from typing import Any

import jax
import jax.numpy as jnp

from meshpar.errors import LayoutError, MeshparError
from meshpar.layouts.layout import Layout
from meshpar.models.model import Model


def check_arguments(
    model: Any, optimizer: Any, layout: Any, clip_norm: Any, compute_dtype: Any
) -> None:
    """Checks what can be known of each argument alone.

    Args:
      model: as in `lower`.
      optimizer: as in `lower`.
      layout: as in `lower`, read from its string.
      clip_norm: as in `lower`.
      compute_dtype: as in `lower`.

    Raises:
      LayoutError: the layout is neither a `Layout` nor a string.
      MeshparError: another argument of the wrong kind, or out of range.
    """
    if not isinstance(model, Model):
        raise MeshparError(
            f"model={model!r}: use a model of meshpar.from_nnx or meshpar.from_linen"
        )
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise MeshparError(
            f"optimizer={optimizer!r}: use an optax optimizer, such as optax.adam(1e-3)"
        )
    if not isinstance(layout, Layout):
        raise LayoutError(
            f'layout={layout!r}: use a Layout or its string, such as "data=2,fsdp=4"'
        )
    is_number = isinstance(clip_norm, int | float) and not isinstance(clip_norm, bool)
    if clip_norm is not None and not (is_number and clip_norm > 0):
        raise MeshparError(f"clip_norm={clip_norm!r}: use a number above 0, or None")
    if compute_dtype is not None and not _is_float(compute_dtype):
        raise MeshparError(
            f"compute_dtype={compute_dtype!r}: use a dtype of floats, such as "
            "jnp.bfloat16, or None for the dtype of the parameters"
        )


def _is_float(dtype: Any) -> bool:
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        return False


def check_leaves(batch: Any) -> None:
    """Raises MeshparError for leaves of a batch that are no arrays, abstract or not."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise MeshparError(
                f"batch{jax.tree_util.keystr(path)} is a {type(leaf).__name__}; give "
                "arrays or ShapeDtypeStructs [batch, ...], such as np.asarray(...)"
            )
