"""Sharding rules: which mesh axes split a dim of a parameter or an activation."""

from collections.abc import Iterable, Mapping
from typing import Any

from meshpar.errors import LayoutError, nearest
from meshpar.layouts.axes import AXES, BATCH_AXES

PARAM_RULES: dict[str, tuple[str, ...]] = {
    "embed": ("fsdp",),
    "mlp": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "vocab": ("tensor",),
    "head_dim": (),
    "kv": (),
    "length": (),
    "layers": ("pipe",),
} | {axis: (axis,) for axis in AXES}
"""Default rules for parameters: Megatron's for `tensor`, the embed dim for `fsdp`.

The stack of layers is cut into the stages of a pipeline.

An axis name is a dim name too, so models annotated with mesh axes work as they are.
"""

_ACTIVATION_DIMS: dict[str, tuple[str, ...]] = {
    "batch": BATCH_AXES,
    "length": (),
    "residual_length": ("tensor",),
    "embed": (),
    "head_dim": (),
    "kv": (),
    "mlp": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "vocab": ("tensor",),
}
ACTIVATION_RULES: dict[str, tuple[str, ...]] = {
    **_ACTIVATION_DIMS,
    **{f"activation_{dim}": axes for dim, axes in _ACTIVATION_DIMS.items()},
    **{axis: (axis,) for axis in AXES},
}
"""Default rules for activations, for `constrain` and for Flax's own functions.

Public Flax models often write `activation_embed` for the embed dim of an activation.
`residual_length` is the length of the stream between blocks (sequence parallelism).
"""

Names = tuple[Any, ...]
Rule = str | Iterable[str] | None


def rule_axes(name: str, rule: Rule) -> tuple[str, ...]:
    """The mesh axes of one rule, checked."""
    axes = () if rule is None else (rule,) if isinstance(rule, str) else tuple(rule)
    for axis in axes:
        if axis not in AXES:
            raise LayoutError(
                f"rule {name!r} -> {axis!r}: no such mesh axis ({nearest(axis, AXES)})"
            )
    if len(set(axes)) != len(axes):
        raise LayoutError(f"rule {name!r} -> {axes}: an axis may stand there once")
    return axes


def as_rules(rules: Mapping[str, Rule] | Iterable) -> tuple:
    """Rules as sorted (dim name, axes) pairs."""
    pairs = rules.items() if isinstance(rules, Mapping) else rules
    return tuple(sorted((name, rule_axes(name, rule)) for name, rule in pairs))
