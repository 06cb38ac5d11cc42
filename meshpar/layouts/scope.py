"""The layout that a model is traced under: `constrain`, `remat` and what was named.

Models name their activations with `constrain` and their layer boundary with `remat`;
both do nothing outside a layout, so a model runs unchanged without meshpar.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshpar.errors import LayoutError, nearest
from meshpar.layouts.layout import Layout
from meshpar.layouts.remat import REMAT_POLICIES


@dataclasses.dataclass(eq=False)
class Scope:
    """The layout and mesh that a traced model runs under, and what it named.

    Over the manual axes (inside shard_map) the model sees shards already.

    Each one is a key of jax's tracing caches, so that a jitted function inside a model
    is traced anew under every layout.
    """

    layout: Layout
    mesh: Mesh
    manual_axes: frozenset[str] = frozenset()
    names_used: set[str] = dataclasses.field(default_factory=set)
    vocabulary_used: dict[str, int] = dataclasses.field(default_factory=dict)
    remat_used: bool = False


_scope = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def use(layout: Layout, mesh: Mesh, manual_axes: Iterable[str] = ()) -> Iterator[Scope]:
    """Makes `constrain` and `remat` follow a layout while a model is traced."""
    with _scope(scope := Scope(layout, mesh, frozenset(manual_axes))):
        yield scope


def current_scope() -> Scope | None:
    """The scope that the model being traced runs under; None outside a layout."""
    return _scope.value


def activation_spec(
    scope: Scope, shape: Sequence[int], names: Sequence[str | None]
) -> PartitionSpec:
    """The axes of an activation's dims, but for the manual ones of the scope.

    Raises:
      LayoutError: a wrong number of names, a name without a rule, a dim that does not
        divide, or an axis that two dims ask for.
    """
    what = f"constrain(x{list(shape)}, {', '.join(map(repr, names))})"
    if len(names) != len(shape):
        raise LayoutError(f"{what}: {len(names)} names for {len(shape)} dims")
    rules, sizes, entries = scope.layout.activation_rules, dict(scope.mesh.shape), []
    for size, name in zip(shape, names, strict=True):
        if name is not None and name not in rules:
            raise LayoutError(
                f"{what}: no rule for {name!r} ({nearest(name, rules)}); add "
                f"activations.{name}=AXIS or activations.{name}=none to the layout"
            )
        axes = tuple(
            a
            for a in rules.get(name, ())
            if sizes.get(a, 1) > 1 and a not in scope.manual_axes
        )
        ways = math.prod(sizes[a] for a in axes)
        if size % ways:
            raise LayoutError(
                f"{what}: {name}={size} does not divide over {'*'.join(axes)}={ways}; "
                f"change the size, or set activations.{name}=none"
            )
        scope.names_used.add(name)
        entries.append(axes)
    flat = [axis for axes in entries for axis in axes]
    if len(set(flat)) != len(flat):
        twice = next(axis for axis in flat if flat.count(axis) > 1)
        first = next(n for n, axes in zip(names, entries, strict=True) if twice in axes)
        raise LayoutError(
            f"{what}: two dims on axis {twice!r}; map one of them to none, as in "
            f"activations.{first}=none"
        )
    return PartitionSpec(
        *(axes[0] if len(axes) == 1 else axes or None for axes in entries)
    )


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Names the dims of an activation, and shards it as the layout in use says.

    Works on automatic mesh axes (a sharding constraint) and on explicit ones (a
    reshard); returns `x` as it is outside a layout.

    Args:
      x: an array of any dtype.
      *names: one dim name per dim of `x`; None leaves that dim whole.

    Raises:
      LayoutError: a wrong number of names, a name without a rule, a dim that does not
        divide, or an axis that two dims ask for.
    """
    scope = _scope.value
    if scope is None:
        return x
    spec = activation_spec(scope, x.shape, names)
    if scope.manual_axes:
        # The mesh at hand inside shard_map knows which axes are manual.
        sizes = scope.mesh.shape
        free = any(n > 1 for a, n in sizes.items() if a not in scope.manual_axes)
        return jax.lax.with_sharding_constraint(x, spec) if free else x
    if all(kind == AxisType.Explicit for kind in scope.mesh.axis_types):
        return jax.sharding.reshard(x, NamedSharding(scope.mesh, spec))
    return jax.lax.with_sharding_constraint(x, NamedSharding(scope.mesh, spec))


def remat(fn: Callable, transform: Callable = jax.checkpoint) -> Callable:
    """Rematerializes a layer in the backward pass, as the layout in use says.

    Wrap the function that runs one layer, inside the scan over layers.

    Args:
      fn: the layer; for Linen modules pass the class and ``transform=nn.remat``.
      transform: a checkpoint transformation that takes ``policy=``.

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost,
      arXiv:1604.06174.
    """
    scope = _scope.value
    if scope is None:
        return fn
    scope.remat_used = True
    if scope.layout.remat == "none":
        return fn
    return transform(fn, policy=REMAT_POLICIES[scope.layout.remat]())
