"""Resolves a layout for one model: the sharding of every leaf, or every problem."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, keystr, tree_flatten_with_path, tree_unflatten

from meshpar.arrays import num_bytes, parameter_path, stack_of_row
from meshpar.errors import LayoutError, nearest
from meshpar.layouts.axes import AXES, FSDP, PIPE, in_use, is_held, names_of
from meshpar.layouts.layout import Layout
from meshpar.layouts.param import STACKED_DIM, Param, follows_load
from meshpar.layouts.plan import LeafPlan, Plan, Spec


@dataclasses.dataclass(frozen=True)
class _Resolved:
    """Dim names of one tensor, mesh axes per dim, and the reason for them."""

    names: tuple | None
    spec: Spec
    reason: str


_LARGE = 2**16
"""Elements from which on a parameter that no axis can split is a problem."""

_SHOWN = 3
"""Parameters that one problem names."""


class _Resolver:
    """Resolves parameters one by one and collects every problem."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.rules = layout.param_rules
        self.sizes = layout.sizes
        # Pipelines leave unnamed parameters whole, and fsdp splits any dim.
        self.needs_names = [
            axis
            for axis in names_of(needs_sharded_params=True)
            if axis not in (PIPE, FSDP) and self.sizes[axis] > 1
        ]
        self.problems: dict[str, list[str]] = {}  # What is wrong, and with what.
        self.allowable: list[str] = []
        self.names_seen: set[str] = set()
        self.paths_used: set[str] = set()
        self.allowances_used: set[str] = {"idle_devices", "slow_links"}

    def resolve(self, path: str, param: Param) -> _Resolved:
        """The sharding of one parameter by the rules."""
        names = self._names(path, param)
        if param.is_state and param.shape and not any(names):
            return _Resolved(names, _whole(param.shape), "state without dim names")
        own, unnamed = None, ""
        if names is None:
            own, unnamed = self._unnamed(path, param)
            if own is None and not param.is_stacked:
                return _Resolved(None, _whole(param.shape), unnamed)
            names = _no_names(param)
        spec, reasons = [], []
        for dim, (name, size) in enumerate(zip(names, param.shape, strict=True)):
            axes, why = self._axes(path, name), ""
            if dim == own:
                axes, why = (FSDP,), f" ({unnamed})"
            small = param.size < self.layout.min_shard_size
            if elsewhere := [a for a in axes if _holds_another(a, name, names)]:
                axes = tuple(axis for axis in axes if axis not in elsewhere)
                why = f" ({elsewhere[0]} splits its own dim)"
            if small and axes != _held(name, axes):
                axes = _held(name, axes)
                why = f" ({param.size} < min_shard_size={self.layout.min_shard_size})"
            if taken := [axis for axis in axes if any(axis in used for used in spec)]:
                self._refuse_second_dim(path, names, name, taken[0])
                axes = tuple(axis for axis in axes if axis not in taken)
                why = f" ({taken[0]} taken by an earlier dim, allowed)"
            ways = math.prod(self.sizes[axis] for axis in axes)
            if size % ways:
                self._refuse_remainder(path, param, dim, name, axes)
                axes, why = (), f" ({size} does not divide over {ways}, allowed)"
            spec.append(axes)
            reasons.append(f"{name or '-'}->{'*'.join(axes) or 'whole'}{why}")
        return _Resolved(names, tuple(spec), ", ".join(reasons))

    def _names(self, path: str, param: Param) -> tuple | None:
        """Dim names from the model, or from the first path rule that matches."""
        if param.names is not None:
            return param.names
        for regex, names in self.layout.paths:
            if re.search(regex, path):
                self.paths_used.add(regex)
                if param.is_stacked and len(names) == len(param.shape) - 1:
                    names = (STACKED_DIM, *names)
                if len(names) == len(param.shape):
                    return names
                self._add(
                    f"path rule {regex!r} gives {len(names)} names {names} for "
                    f"{len(param.shape)} dims",
                    f"{path} {param.shape}",
                )
                return (None,) * len(param.shape)
        if not param.shape or param.is_state:
            return _no_names(param)
        return None

    def _unnamed(self, path: str, param: Param) -> tuple[int | None, str]:
        """(dim that `fsdp` splits, reason) of a parameter whose dims have no names."""
        is_split, ways = self.sizes[FSDP] > 1, self.sizes[FSDP]
        if not is_split and not self.needs_names:
            return None, "no axis shards it"
        if self._allowed(path):
            return None, "allowed: unnamed"
        if self.needs_names:
            self._add(
                f"its dims have no names, which {' and '.join(self.needs_names)} "
                "needs; annotate it in the model, name it with paths.REGEX=DIM/DIM, or "
                "keep it whole with allow=REGEX",
                f"{path} {param.shape}",
                path,
            )
            return None, "unnamed"
        if param.size < self.layout.min_shard_size:
            return None, f"{param.size} < min_shard_size={self.layout.min_shard_size}"
        sizes = dict(enumerate(param.shape))
        if param.is_stacked:
            del sizes[0]
        fitting = [dim for dim, size in sizes.items() if size and size % ways == 0]
        if fitting:
            dim = max(fitting, key=lambda dim: (sizes[dim], -dim))
            return dim, "unnamed: its largest dim that divides"
        if param.size >= _LARGE:
            self._add(
                f"its dims have no names, and none divides over {FSDP}={ways}; change "
                "a size, or keep it whole with allow=REGEX",
                f"{path} {param.shape}",
                path,
            )
        return None, f"unnamed, and no dim divides over {FSDP}={ways}"

    def _add(self, cause: str, subject: str, allowable: str = "") -> None:
        """Notes a problem of a parameter, and the path to allow if that helps."""
        self.problems.setdefault(cause, []).append(subject)
        self.allowable += [allowable] if allowable else []

    def _axes(self, path: str, name: Any) -> tuple[str, ...]:
        """Mesh axes that the rules give to one dim name (or tuple of names)."""
        if name is None:
            return ()
        if isinstance(name, tuple):
            return tuple(axis for part in name for axis in self._axes(path, part))
        self.names_seen.add(name)
        if name not in self.rules:
            self._add(
                f"no rule for dim {name!r} ({nearest(name, self.rules)}); add "
                f"params.{name}=AXIS or params.{name}=none to the layout; if the model "
                f"calls a mesh axis so, axes.{name}=AXIS, which is "
                f'axis_names={{AXIS: "{name}"}} of lower',
                path,
            )
            return ()
        return in_use(self.rules[name], self.sizes)

    def _allowed(self, path: str) -> bool:
        matches = {regex for regex in self.layout.allow if re.search(regex, path)}
        self.allowances_used |= matches
        return bool(matches)

    def _refuse_second_dim(self, path: str, names: tuple, name: Any, axis: str) -> None:
        if not self._allowed(path):
            self._add(
                f"two dims on axis {axis!r}; map one to none (params.{name}=none), or "
                "keep the first with allow=REGEX",
                f"{path} {dict(enumerate(names))}",
                path,
            )

    def _refuse_remainder(
        self, path: str, param: Param, dim: int, name: Any, axes: tuple[str, ...]
    ) -> None:
        if not self._allowed(path):
            ways = math.prod(self.sizes[axis] for axis in axes)
            self._add(
                f"dim {dim} ({name}={param.shape[dim]}) does not divide over "
                f"{'*'.join(axes)}={ways}; change the size or the axis, map it to none "
                f"(params.{name}=none), or allow it with allow=REGEX",
                f"{path} {param.shape}",
                path,
            )

    def finish(self, specs: list[Spec]) -> None:
        """Adds the problems that only the whole model shows."""
        layout = self.layout
        for name, _ in layout.params:
            if name not in self.names_seen:
                known = nearest(name, self.names_seen)
                self._add(f"rule params.{name} matches no dim ({known})", "")
        for regex, _ in layout.paths:
            if regex not in self.paths_used:
                self._add(f"path rule {regex!r} matches no unnamed parameter", "")
        for regex in layout.allow:
            if regex not in self.allowances_used:
                self._add(f"allowance {regex!r} allows nothing; remove it", "")
        used = {axis for spec in specs for axes in spec for axis in axes}
        for axis in names_of(needs_sharded_params=True):
            if self.sizes[axis] > 1 and axis not in used:
                self._add(
                    f"axis {axis}={self.sizes[axis]} shards no parameter; map a dim to "
                    f"it (params.DIM={axis}), lower min_shard_size, or use data "
                    "instead",
                    "",
                )

    def lines(self) -> list[str]:
        """One line for each problem, with the parameters that have it."""
        lines = []
        for cause, subjects in self.problems.items():
            shown, more = ", ".join(subjects[:_SHOWN]), len(subjects) - _SHOWN
            shown += f" and {more} more" if more > 0 else ""
            lines.append(f"{shown}: {cause}" if shown else cause)
        return lines


def _resolved(
    layout: Layout, params: Mapping[str, Param]
) -> tuple[_Resolver, dict[str, _Resolved]]:
    """The resolver of a layout, with its problems, and the shardings."""
    resolver = _Resolver(layout)
    # Messages name the largest tensors first.
    order = sorted(params, key=lambda path: -math.prod(params[path].shape))
    found = {path: resolver.resolve(path, params[path]) for path in order}
    resolver.finish([leaf.spec for leaf in found.values()])
    return resolver, {path: found[path] for path in params}


def _check(resolver: _Resolver, params: Mapping[str, Param]) -> None:
    """Raises LayoutError if there are problems, with a layout that has none."""
    if not resolver.problems:
        return
    layout = resolver.layout
    message = f'layout "{layout}" does not fit the model:\n  '
    message += "\n  ".join(resolver.lines())
    if resolver.allowable:
        names = sorted({re.escape(p.rsplit("/", 1)[-1]) for p in resolver.allowable})
        # Apart they need no quotes, which a shell would take.
        apart = tuple(f"{name}$" for name in names)
        allowed = dataclasses.replace(layout, allow=(*layout.allow, *apart))
        if not _resolved(allowed, params)[0].problems:
            message += f"\nThis layout fits: {allowed}"
    raise LayoutError(message)


def _no_names(param: Param) -> tuple:
    """Names of no dims, but for that of the layers of a stack."""
    unnamed = (None,) * len(param.shape)
    return (STACKED_DIM, *unnamed[1:]) if param.is_stacked else unnamed


def _whole(shape: tuple[int, ...]) -> Spec:
    return ((),) * len(shape)


def _held(name: Any, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of a dim along which it is held, and not gathered before use."""
    return tuple(axis for axis in axes if is_held(axis, name))


def _holds_another(axis: str, name: Any, names: tuple) -> bool:
    """Whether an axis would gather one dim of a tensor and holds another one."""
    return not is_held(axis, name) and any(is_held(axis, other) for other in names)


def _related_spec(param: Param, spec: Spec, shape: tuple[int, ...]) -> tuple[Spec, str]:
    """(spec, relation) of an optimizer leaf of another shape than its parameter."""
    more = len(shape) - len(param.shape)
    if more > 0 and shape[more:] == param.shape:
        return _whole(shape[:more]) + spec, "with dims in front"  # L-BFGS
    specs = {
        spec[:d] + spec[d + 1 :]
        for d in range(len(param.shape))
        if param.shape[:d] + param.shape[d + 1 :] == shape
    }
    if len(specs) == 1:
        return specs.pop(), "less one dim"  # Adafactor
    return _whole(shape), "another shape, whole"


@dataclasses.dataclass(frozen=True)
class _LeafPlans:
    """Makes the plans of parameters, weights, gradients and optimizer leaves."""

    layout: Layout
    params: Mapping[str, Param]
    resolved: Mapping[str, _Resolved]

    def leaf(self, path: str, kind: str, x: Any, resolved: _Resolved) -> LeafPlan:
        """The plan of one tensor; `x` has its shape and its dtype."""
        names, spec, reason = resolved.names, resolved.spec, resolved.reason
        ways = math.prod(getattr(self.layout, axis) for axes in spec for axis in axes)
        size, shape = num_bytes(x) // ways, tuple(x.shape)
        return LeafPlan(path, kind, shape, x.dtype, names, spec, reason, size)

    def follow(
        self, kind: str, sharded_from: int, float_dtype: Any = None
    ) -> dict[str, LeafPlan]:
        """Plans that follow the parameters, gathered below a ZeRO level."""
        plans = {}
        for path, param in self.params.items():
            if kind == "gradient" and not param.trained:
                continue
            resolved, dtype = self.resolved[path], param.dtype
            if self.layout.zero_level < sharded_from:
                resolved = self._gathered(resolved)
            keeps_dtype = param.is_state or follows_load(param.names)
            floating = jnp.issubdtype(dtype, jnp.floating) and not keeps_dtype
            if float_dtype is not None and floating:
                dtype = float_dtype
            x = jax.ShapeDtypeStruct(param.shape, dtype)
            own_kind = param.kind if kind == "parameter" else kind
            plans[path] = self.leaf(path, own_kind, x, resolved)
        return plans

    def _gathered(self, resolved: _Resolved) -> _Resolved:
        """The sharding of a tensor after it was gathered."""
        if resolved.names is None:
            return resolved
        spec = tuple(map(_held, resolved.names, resolved.spec))
        lost = {a for axes in resolved.spec for a in axes}.difference(*spec)
        if not lost:
            return resolved
        axes = "*".join(axis for axis in AXES if axis in lost)
        reason = f"; whole over {axes}: zero={self.layout.zero_level}"
        return _Resolved(resolved.names, spec, resolved.reason + reason)

    def optimizer_leaf(self, keys: tuple, x: Any) -> LeafPlan:
        """The plan of one leaf of the optimizer state; it follows its parameter."""
        path = parameter_path(keys, self.params)
        resolved = _Resolved(None, _whole(x.shape), "no parameter's: whole")
        if path is None and (stack := _stack_of(keys)) in self.params:
            resolved = self._row(stack, x.shape)
        if path is not None:
            resolved, param = self.resolved[path], self.params[path]
            if x.shape != param.shape:
                spec, relation = _related_spec(param, resolved.spec, x.shape)
                reason = f"{x.shape} of {path} {param.shape}: {relation}"
                resolved = _Resolved(None, spec, reason)
        return self.leaf(keystr(keys), "optimizer", x, resolved)

    def _row(self, stack: str, shape: tuple[int, ...]) -> _Resolved:
        """The sharding of a leaf of one layer of a stack."""
        param, spec = self.params[stack], self.resolved[stack].spec[1:]
        if shape == param.shape[1:]:
            return _Resolved(None, spec, f"one layer of {stack}")
        row = dataclasses.replace(param, shape=param.shape[1:])
        spec, relation = _related_spec(row, spec, shape)
        return _Resolved(None, spec, f"{shape}, of one layer of {stack}: {relation}")


def _stack_of(keys: tuple) -> str:
    """Path of the stack whose layer a leaf of the state belongs to; "" for no stack."""
    entries = (key.key for key in keys if isinstance(key, DictKey))
    return next(filter(None, map(stack_of_row, entries)), "")


def make_plan(
    layout: Layout,
    params: Mapping[str, Param],
    optimizer_state: Any,
    compute_dtype: Any = None,
) -> Plan:
    """Resolves a layout for a model's parameters and its abstract optimizer state.

    Args:
      layout: the layout.
      params: {path: Param}.
      optimizer_state: `jax.eval_shape(optimizer.init, params)`; leaves below a
        dict key that is a parameter's path follow that parameter.
      compute_dtype: dtype of the weights inside the loss; the parameters' own if None.

    Raises:
      LayoutError: every rule that cannot be honoured, each with its remedy.

    Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5 (the state that each
      level shards).
    """
    resolver, resolved = _resolved(layout, params)
    _check(resolver, params)
    plans = _LeafPlans(layout, params, resolved)
    leaves, treedef = tree_flatten_with_path(optimizer_state)
    optimizer = tuple(plans.optimizer_leaf(keys, leaf) for keys, leaf in leaves)
    return Plan(
        layout=layout,
        parameters=plans.follow("parameter", sharded_from=1),
        weights=plans.follow("weight", 3, compute_dtype),
        gradients=plans.follow("gradient", 2, compute_dtype),
        optimizer=optimizer,
        optimizer_specs=tree_unflatten(treedef, [x.partition_spec for x in optimizer]),
    )
