"""Sharding rules: which mesh axes split a dim of a parameter or an activation."""

from collections.abc import Iterable, Mapping
from typing import Any

from meshpar.errors import LayoutError, nearest, shown
from meshpar.layouts.axes import AXES, BATCH_DIMS, RECORDS
from meshpar.layouts.param import LOAD_DIM

Names = tuple[Any, ...]
Rule = str | Iterable[str] | None


def _default_rules(field: str, *whole_dims: str) -> dict[str, tuple[str, ...]]:
    """{dim: axes} from a field of the axis records; no axis splits `whole_dims`."""
    rules: dict[str, tuple[str, ...]] = {dim: () for dim in whole_dims}
    for axis in RECORDS:
        for dim in getattr(axis, field):
            rules[dim] = (*rules.get(dim, ()), axis.name)
    return rules


_OWN_DIMS: dict[str, tuple[str, ...]] = {axis: (axis,) for axis in AXES}
"""Axis names are dim names too, for models that are annotated with mesh axes."""

PARAM_RULES: dict[str, tuple[str, ...]] = (
    _default_rules("param_dims", "head_dim", "kv", "length", LOAD_DIM) | _OWN_DIMS
)
"""Default rules for parameters.

`tensor` splits the dims that Megatron splits, `fsdp` the embed dim, `pipe` the stack of
layers.
"""

_ACTIVATION_DIMS: dict[str, tuple[str, ...]] = BATCH_DIMS | _default_rules(
    "activation_dims", "embed", "head_dim", "kv", "layers"
)
ACTIVATION_RULES: dict[str, tuple[str, ...]] = {
    **_ACTIVATION_DIMS,
    **{f"activation_{dim}": axes for dim, axes in _ACTIVATION_DIMS.items()},
    **_OWN_DIMS,
}
"""Default rules for activations, in `constrain` and in Flax's own functions.

Public Flax models often write `activation_embed` for the embed dim of an activation.
`residual_length` is the length of the stream between blocks (sequence parallelism),
`cache_batch` and `cache_length` are dims of the keys and values that generation keeps.
"""


def rule_axes(name: str, rule: Rule) -> tuple[str, ...]:
    """The mesh axes of one rule.

    Raises:
      LayoutError: an axis that does not exist, or an axis given twice.
    """
    one = isinstance(rule, str) or not isinstance(rule, Iterable)
    axes = () if rule is None else (rule,) if one else tuple(rule)
    for axis in axes:
        if axis not in AXES:
            raise LayoutError(
                f"rule {shown(name)!r} -> {shown(str(axis))!r}: no such mesh axis "
                f"({nearest(shown(str(axis)), AXES)})"
            )
    if len(set(axes)) != len(axes):
        raise LayoutError(f"rule {shown(name)!r} -> {axes}: give each axis once")
    return axes


def as_axes(axis_names: Mapping[str, str | Iterable[str]]) -> dict[str, tuple]:
    """{name in the model: mesh axes} from {mesh axis: its name in the model, or names}.

    Several axes with one name are that name together.

    Raises:
      LayoutError: an axis that does not exist, or a name that is no text.
    """
    if not isinstance(axis_names, Mapping):
        raise LayoutError(
            f"axis_names={shown(repr(axis_names))}: give {{mesh axis: its name in the "
            'model}, such as {"tensor": "tp"}'
        )
    found: dict[str, tuple[str, ...]] = {}
    for axis in sorted(axis_names, key=lambda axis: (*AXES, axis).index(axis)):
        names = axis_names[axis]
        for name in (names,) if isinstance(names, str) else tuple(names):
            if not isinstance(name, str):
                raise LayoutError(
                    f"axis_names={{{axis!r}: {shown(repr(name))}}}: give the name of "
                    "the axis in the model, such as 'tp'"
                )
            found[name] = (*found.get(name, ()), *rule_axes(name, axis))
    return found


def check_axes(axes: Iterable[tuple[str, tuple[str, ...]]]) -> None:
    """Raises LayoutError if an axis of every mesh is the model's name of others."""
    for name, own in axes:
        if name in AXES and name not in own:
            raise LayoutError(
                f"axes.{name}={'+'.join(own) or 'none'}: {name} is an axis of every "
                f"layout, and keeps it, as in axes.{name}={'+'.join((name, *own))}"
            )


def as_rules(rules: Mapping[str, Rule] | Iterable) -> tuple:
    """Rules as sorted (dim name, axes) pairs."""
    pairs = rules.items() if isinstance(rules, Mapping) else rules
    return tuple(sorted((name, rule_axes(name, rule)) for name, rule in pairs))
