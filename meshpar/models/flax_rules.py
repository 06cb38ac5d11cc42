"""Flax's logical axis rules of a layout, which see the dim names that a model uses.

`nn.with_logical_constraint` and its relatives look up dim names in the rules of
`nn.logical_axis_rules`. A name without a rule means "whole" to Flax; under a layout it
is an error, as in `constrain`.
"""

from collections.abc import Iterator
from typing import Any

from meshpar.layouts.scope import Scope, activation_axes


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
