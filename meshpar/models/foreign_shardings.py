"""Shardings that a model states itself: PartitionSpecs in place of dim names.

Public models hand a `PartitionSpec` to `jax.lax.with_sharding_constraint`, with the
axes of a mesh of their own. Under a layout these are names of its axes (`Layout.axes`).
A layout honours constraints over axes that it leaves to the compiler, and those that
its shards of a batch keep anyway; everything else is an error with a remedy.
"""

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import (
    AxisType,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from meshpar import compat
from meshpar.errors import LayoutError, MeshparError, nearest
from meshpar.jaxprs.walk import equations
from meshpar.layouts.axes import BATCH_DIMS, in_use, ways_of
from meshpar.layouts.plan import partition_spec
from meshpar.layouts.scope import Scope, current_scope, is_unsharded

_REMEDY = (
    "name the dims with layouts.constrain or nn.with_logical_constraint in its place, "
    "or leave it out of the model's configuration (metadata of parameters may stay)"
)


@functools.cache
def install() -> None:
    """Makes constraints of models follow the layout that is in use."""
    compat.translate_constraints(_over_own_axes)
    compat.constrain_out_shardings(_over_own_axes, _replaces)


def _replaces() -> bool:
    """Whether `_over_own_axes` gives other shardings now."""
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return not explicit and (is_unsharded() or current_scope() is not None)


def _over_own_axes(sharding: Any) -> Any:
    """The constraint of a model on an array, over the axes of the layout in use.

    Raises:
      LayoutError: the layout has no such axis, or cannot honour the constraint.
    """
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if not isinstance(spec, PartitionSpec):
        return sharding
    if is_unsharded():
        if jax.sharding.get_abstract_mesh().empty:
            return SingleDeviceSharding(jax.devices()[0])
        return PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * len(spec))
    if (scope := current_scope()) is None:
        return sharding
    own = scope.mesh.abstract_mesh, jax.sharding.get_abstract_mesh()
    if sharding is not spec and sharding.mesh.abstract_mesh in own:
        return sharding
    return PartitionSpec(*(_own_axes(scope, spec, dim) for dim in range(len(spec))))


def _own_axes(scope: Scope, spec: PartitionSpec, dim: int) -> Any:
    """The entry of one dim, over axes that are not manual where the model is traced.

    Raises:
      LayoutError: as in `_over_own_axes`.
    """
    if (entry := spec[dim]) is None or entry is PartitionSpec.UNCONSTRAINED:
        return entry
    names, axes = _names_of_axes(scope), []
    for name in (entry,) if isinstance(entry, str) else entry:
        if name not in names:
            raise LayoutError(f"{_unknown(name, spec)}: {_REMEDY}")
        if name in dict(scope.layout.axes):
            scope.names_used.add(name)
        axes += [axis for axis in names[name] if axis not in axes]
    manual = set(axes) & scope.manual_axes
    # A shard of the batch has its rows and its part of the length.
    if not manual <= {*dict(enumerate(BATCH_DIMS.values())).get(dim, ())}:
        raise LayoutError(f"{_by_hand(spec)}: {_REMEDY}")
    return partition_spec([tuple(a for a in axes if a not in manual)])[0]


def _names_of_axes(scope: Scope) -> dict[str, tuple[str, ...]]:
    """{name of an axis in a PartitionSpec: axes of the mesh}."""
    own = {axis: (axis,) for axis in scope.mesh.axis_names}
    return own | dict(scope.layout.axes)


def _unknown(name: str, spec: Any) -> str:
    """The problem of a name that no axis has."""
    problem = (
        f"the model shards an array by {spec}, and no mesh axis is called {name!r}"
    )
    if (scope := current_scope()) is None:
        return problem
    used = in_use(scope.mesh.axis_names, scope.mesh.shape)
    has = ", ".join(f"{axis}={scope.mesh.shape[axis]}" for axis in used)
    return (
        f"{problem} ({nearest(name, _names_of_axes(scope))}; the layout has {has}); if "
        f"the model calls one of them so, give lower(axis_names={{AXIS: {name!r}}}), "
        f"which is axes.{name}=AXIS in the layout. Else"
    )


def _by_hand(spec: Any) -> str:
    """The problem of a constraint over an axis that shard_map splits."""
    return (
        f"the model shards an array by {spec}, and lowering=shard_map splits that axis "
        "itself; lowering=jit takes such a constraint"
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
        why = _unknown(found[1], found[2])
    elif found := re.search(r"can only refer to Auto axes.*spec=(P\(.*?\)) and", text):
        why = _by_hand(found[1])
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
