"""The layout that a model is traced under, and the functions that follow it.

Models name the dims of activations with `constrain` and mark their layers with `remat`.
Outside a layout both do nothing, so that a model runs alone too.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshpar.errors import LayoutError, nearest
from meshpar.layouts.axes import AXES, ways_of
from meshpar.layouts.layout import Layout
from meshpar.layouts.mixes import is_mix, segments
from meshpar.layouts.plan import partition_spec
from meshpar.layouts.remat import NONE, wrap_remat


@dataclasses.dataclass(eq=False)
class Scope:
    """The layout and mesh that a model is traced under, and the names it used.

    A scope is a key of jax's tracing caches: a jitted function inside a model is traced
    again under every layout.

    Attributes:
      layout: the layout.
      mesh: the mesh.
      manual_axes: axes of the shard_map around the model, over which it sees shards.
      names_used: dim names that `constrain` or a function of Flax saw.
      vocabulary_used: {function of `ops.vocabulary`: size of the vocabulary it saw}.
      remat_used: whether the model called `remat`.
      remat_outside: whether it did where a mix of policies gives none: `policy_of`.
      experts_used: the config of each call of `ops.experts.mixture`.
      heads_used: numbers of heads of keys that `ops.context.attention` saw.
      looped_flops: FLOPs of grouped matmuls, where loops hide their number of rounds.
      marks_rows: whether `ops.vocabulary.lookup` marks rows as varying over `pipe`.
    """

    layout: Layout
    mesh: Mesh
    manual_axes: frozenset[str] = frozenset()
    names_used: set[str] = dataclasses.field(default_factory=set)
    vocabulary_used: dict[str, int] = dataclasses.field(default_factory=dict)
    remat_used: bool = False
    remat_outside: bool = False
    experts_used: set[Any] = dataclasses.field(default_factory=set)
    heads_used: set[int] = dataclasses.field(default_factory=set)
    looped_flops: list[float] = dataclasses.field(default_factory=list)
    marks_rows: bool = True

    def note(self, inner: "Scope") -> None:
        """Takes note of what the model used in a scope inside this one."""
        self.names_used |= inner.names_used
        self.vocabulary_used |= inner.vocabulary_used
        self.remat_used |= inner.remat_used
        self.remat_outside |= inner.remat_outside
        self.experts_used |= inner.experts_used
        self.heads_used |= inner.heads_used


_scope = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def use(layout: Layout, mesh: Mesh, manual_axes: Iterable[str] = ()) -> Iterator[Scope]:
    """Makes `constrain` and `remat` follow a layout while a model is traced."""
    around = _scope.value
    with _scope(scope := Scope(layout, mesh, frozenset(manual_axes))):
        yield scope
    if around is not None:
        around.note(scope)


_unsharded = jax.make_user_context(default_value=False)


def unsharded() -> contextlib.AbstractContextManager:
    """Traces a model where its own shardings do not count.

    It runs on one device, is initialized, or is traced for a check.
    """
    return _unsharded(True)


def is_unsharded() -> bool:
    """Whether a model is traced so; jax itself checks shardings over explicit axes."""
    kinds = jax.sharding.get_abstract_mesh().axis_types
    return _unsharded.value and AxisType.Explicit not in kinds


@contextlib.contextmanager
def unmarked_rows() -> Iterator[None]:
    """Traces a model for a check, in which rows of an embedding keep their type."""
    with _scope(dataclasses.replace(_scope.value, marks_rows=False)):
        yield


def current_scope() -> Scope | None:
    """The scope of the model that is being traced; None outside a layout."""
    return _scope.value


def layer_policies(depth: int) -> tuple[tuple[str, int], ...]:
    """(policy, number of layers) of consecutive layers, by the layout in use.

    Args:
      depth: number of layers of the stack.
    """
    scope = _scope.value
    return segments(scope.layout.remat if scope else NONE, depth)


@contextlib.contextmanager
def policy_of(remat: str) -> Iterator[None]:
    """Gives layers that are traced inside their own policy, as `remat` of the layout.

    Args:
      remat: the policy of these layers, one of `layouts.remat.segments`.
    """
    scope = _scope.value
    if scope is None or scope.layout.remat == remat:
        yield
        return
    layout = dataclasses.replace(scope.layout, remat=remat)
    with _scope(own := dataclasses.replace(scope, layout=layout)):
        yield
    scope.note(own)


def with_policy(layer: Callable, remat: str, **options: Any) -> Callable:
    """A layer that is rematerialized by its policy, and traced under it.

    Args:
      layer: the function that runs one layer.
      remat: its policy.
      **options: of `jax.checkpoint`.
    """

    @functools.wraps(layer)
    def traced(*args: Any) -> Any:
        with policy_of(remat):
            return layer(*args)

    return wrap_remat(traced, remat, **options)


def activation_axes(
    scope: Scope, names: Sequence[str | None], call: str
) -> tuple[tuple[str, ...], ...]:
    """The axes larger than 1 that split each named dim, and records the names.

    Axes that no layout has count always: they stand for names
    (`methods.flexflow.step_trace`).

    Args:
      scope: the scope; its manual axes are left out.
      names: dim names of one activation; None leaves a dim whole.
      call: what the model wrote, for errors.

    Raises:
      LayoutError: a name without a rule, or an axis that two dims ask for.
    """
    rules, sizes, entries = scope.layout.activation_rules, dict(scope.mesh.shape), []
    for name in names:
        if name is not None and name not in rules:
            raise LayoutError(
                f"{call}: no rule for {name!r} ({nearest(name, rules)}); add "
                f"activations.{name}=AXIS or activations.{name}=none to the layout"
            )
        scope.names_used.add(name)
        entries.append(
            [a for a in rules.get(name, ()) if sizes.get(a, 1) > 1 or a not in AXES]
        )
    flat = [axis for axes in entries for axis in axes]
    if len(set(flat)) != len(flat):
        twice = next(axis for axis in flat if flat.count(axis) > 1)
        first = next(n for n, axes in zip(names, entries, strict=True) if twice in axes)
        raise LayoutError(
            f"{call}: two dims on axis {twice!r}; map one of them to none, as in "
            f"activations.{first}=none"
        )
    return tuple(
        tuple(a for a in axes if a not in scope.manual_axes) for axes in entries
    )


def activation_spec(
    scope: Scope, shape: Sequence[int], names: Sequence[str | None]
) -> PartitionSpec:
    """The axes that split an activation's dims, without the manual axes of the scope.

    Raises:
      LayoutError: a wrong number of names, a name without a rule, a dim that does not
        divide, or an axis that two dims ask for.
    """
    call = f"constrain(x{list(shape)}, {', '.join(map(repr, names))})"
    if len(names) != len(shape):
        raise LayoutError(f"{call}: {len(names)} names for {len(shape)} dims")
    entries = activation_axes(scope, names, call)
    for size, name, axes in zip(shape, names, entries, strict=True):
        ways = ways_of(axes, scope.mesh.shape)
        if size % ways:
            raise LayoutError(
                f"{call}: {name}={size} does not divide over {'*'.join(axes)}={ways}; "
                f"change the size, or set activations.{name}=none"
            )
    return partition_spec(entries)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Names the dims of an activation and shards it by the layout in use.

    On automatic mesh axes it is a sharding constraint, on explicit axes a reshard.
    Outside a layout it returns `x`.

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
        # Inside shard_map, jax's own mesh knows which axes are manual.
        sizes = scope.mesh.shape
        free = any(n > 1 for a, n in sizes.items() if a not in scope.manual_axes)
        inner = NamedSharding(jax.sharding.get_abstract_mesh(), spec)
        return jax.lax.with_sharding_constraint(x, inner) if free else x
    if all(kind == AxisType.Explicit for kind in scope.mesh.axis_types):
        return jax.sharding.reshard(x, NamedSharding(scope.mesh, spec))
    return jax.lax.with_sharding_constraint(x, NamedSharding(scope.mesh, spec))


def remat(fn: Callable, transform: Callable = jax.checkpoint) -> Callable:
    """Rematerializes a layer in the backward pass, by the policy of the layout in use.

    Wrap the function that runs one layer, inside the scan over layers. Where a mix of
    policies gives the layer none, it returns `fn`, and such a model is not trained.

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
    if is_mix(scope.layout.remat):
        scope.remat_outside = True
        return fn
    return wrap_remat(fn, scope.layout.remat, transform)
