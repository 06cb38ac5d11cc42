"""Flax's logical axis rules of a layout, which see the dim names that a model uses.

`nn.with_logical_constraint` and its relatives look up dim names in the rules of
`nn.logical_axis_rules`. A name without a rule means "whole" to Flax; under a layout it
is an error, as in `constrain`.

Linen runs the initializer of a parameter again wherever a model uses the parameter, to
compare shapes, and constrains the result by the names of its box. Those are names of a
parameter, which the plan shards, and some layers give them to a flattened array. Hence
no box constrains what it holds while a model is traced under a layout, or `unsharded`.
"""

import functools
from collections.abc import Iterator
from typing import Any

import flax.linen as nn

from meshpar.layouts.scope import (
    Scope,
    activation_axes,
    current_scope,
    is_unsharded,
)


class _Names:
    """Stands first among the rules: equals no name, and sees those it is compared to.

    Attributes:
      seen: the names, in order.
    """

    def __init__(self):
        self.seen: list[str] = []

    def __eq__(self, name: object) -> bool:
        if isinstance(name, str):
            self.seen.append(name)
        return False

    __hash__ = object.__hash__


class FlaxRules(tuple):
    """(dim name, mesh axes) pairs, as `nn.logical_axis_rules` takes them.

    Flax goes through the rules once for every array that a model constrains, and asks
    of each rule whether its name is among the array's.
    """

    def __new__(cls, scope: Scope):
        """The rules for activations, without the manual axes of the scope."""
        rules = super().__new__(
            cls,
            (
                (name, tuple(axis for axis in axes if axis not in scope.manual_axes))
                for name, axes in scope.layout.activation_rules.items()
            ),
        )
        rules.scope = scope
        return rules

    def __iter__(self) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """The rules.

        Raises:
          LayoutError: the model uses a name without a rule, or two dims of an array on
            one axis.
        """
        names = _Names()
        yield names, ()
        activation_axes(
            self.scope, names.seen, f"with_logical_constraint({names.seen})"
        )
        yield from super().__iter__()


def _leave_unconstrained(box: type[nn.Partitioned]) -> None:
    """Makes boxes hold back their constraint under a layout, in all threads."""
    unbox = box.unbox

    @functools.wraps(unbox)
    def unbox_in_scope(self: nn.Partitioned, apply_constraint: bool = True) -> Any:
        alone = current_scope() is None and not is_unsharded()
        return unbox(self, apply_constraint and alone)

    box.unbox = unbox_in_scope


for _box in (nn.Partitioned, nn.LogicallyPartitioned):
    _leave_unconstrained(_box)
