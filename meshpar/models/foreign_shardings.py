"""Shardings that a model states itself: PartitionSpecs in place of dim names.

Public models hand a `PartitionSpec` to `jax.lax.with_sharding_constraint`, or pass
`out_sharding=` to their matmuls. A layout honours constraints over axes that it leaves
to the compiler; everything else is an error with a remedy.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from jax.sharding import NamedSharding

from meshpar.errors import LayoutError, MeshparError, nearest
from meshpar.jaxprs.walk import equations
from meshpar.layouts.axes import AXES, ways_of
from meshpar.layouts.scope import Scope

_REMEDY = (
    "name the dims with layouts.constrain or nn.with_logical_constraint in its place, "
    "or leave it out of the model's configuration (metadata of parameters may stay)"
)


def explanation(error: ValueError) -> str:
    """Why jax refused a sharding of the model, with the remedy; "" for other errors."""
    text = str(error).splitlines()[0] if error.args else ""
    if found := re.search(r"PartitionSpec passed to (\S+) .*Auto or Manual", text):
        why = (
            f"the model passes a PartitionSpec to {found[1]}, which needs a mesh with "
            "Explicit axes; those of a layout are automatic or manual"
        )
    elif found := re.search(r"Resource axis: (\S+) of (.+) is not found", text):
        why = (
            f"the model shards an array by {found[2]}, and no mesh axis is called "
            f"{found[1]!r} ({nearest(found[1], AXES)})"
        )
    elif found := re.search(r"can only refer to Auto axes.*spec=(P\(.*?\)) and", text):
        why = (
            f"the model shards an array by {found[1]}, and lowering=shard_map splits "
            "that axis itself; lowering=jit takes such a constraint"
        )
    else:
        return ""
    return f"{why}: {_REMEDY}. jax says: {text}"


@contextlib.contextmanager
def explained_errors() -> Iterator[None]:
    """Turns jax's errors about shardings of the model into errors of the layout.

    Raises:
      LayoutError: a sharding that the model states itself cannot be honoured.
    """
    try:
        yield
    except ValueError as error:
        text = "" if isinstance(error, MeshparError) else explanation(error)
        if not text:
            raise
        raise LayoutError(text) from error


def check_divides(jaxpr: Any, scope: Scope) -> None:
    """Checks that every sharding constraint of a traced model divides its dims.

    jax leaves a dim whole that its axes do not divide.

    Args:
      jaxpr: of the loss.
      scope: in which it was traced.

    Raises:
      LayoutError: a dim that does not divide.
    """
    for eqn in equations(jaxpr):
        if eqn.primitive.name != "sharding_constraint":
            continue
        if not isinstance(sharding := eqn.params["sharding"], NamedSharding):
            continue
        shape, sizes = eqn.outvars[0].aval.shape, sharding.mesh.shape
        for dim, (size, entry) in enumerate(zip(shape, sharding.spec, strict=False)):
            axes = (entry,) if isinstance(entry, str) else entry
            if not isinstance(axes, tuple):  # None or UNCONSTRAINED.
                continue
            if size % (ways := ways_of(axes, sizes)):
                names = [f"activations.{name}=none" for name in _names(scope, axes)]
                raise LayoutError(
                    f"the model constrains an activation {list(shape)} to "
                    f"{sharding.spec}, and dim {dim}={size} does not divide over "
                    f"{'*'.join(axes)}={ways}; change the size, or "
                    + (f"set {' or '.join(names)}" if names else "leave it whole")
                )


def _names(scope: Scope, axes: tuple[str, ...]) -> list[str]:
    """Dim names of the model that the layout maps to these axes."""
    rules = scope.layout.activation_rules
    return sorted(n for n in scope.names_used if n and rules[n] == axes)
