"""Resolves a layout for one model: the spec of every leaf, or every problem found."""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, keystr, tree_flatten_with_path, tree_unflatten

from meshpar.errors import LayoutError, nearest
from meshpar.layouts.axes import FSDP, names_of
from meshpar.layouts.layout import Layout
from meshpar.layouts.param import Param
from meshpar.layouts.plan import LeafPlan, Plan, Spec, partition_spec


class _Resolver:
    """Resolves parameters one by one and collects every problem found."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.rules = layout.param_rules
        self.sizes = layout.sizes
        self.shards_params = layout.fsdp > 1 or layout.tensor > 1
        self.problems: list[str] = []
        self.names_seen: set[str] = set()
        self.paths_used: set[str] = set()
        self.allowances_used: set[str] = {"idle_devices", "slow_links"}

    def allowed(self, path: str) -> bool:
        hits = {regex for regex in self.layout.allow if re.search(regex, path)}
        self.allowances_used |= hits
        return bool(hits)

    def names(self, path: str, param: Param) -> tuple | None:
        """Dim names from the model, or else from the first path rule that matches."""
        if param.names is not None:
            return param.names
        for regex, names in self.layout.paths:
            if re.search(regex, path):
                self.paths_used.add(regex)
                if len(names) == len(param.shape):
                    return names
                self.problems.append(
                    f"{path} {param.shape}: path rule {regex!r} gives "
                    f"{len(names)} names {names} for {len(param.shape)} dims"
                )
                return (None,) * len(param.shape)
        if not param.shape:
            return ()
        if self.shards_params and not self.allowed(path):
            self.problems.append(
                f"{path} {param.shape}: nobody named its dims; annotate it in the "
                f"model, name it with paths.REGEX=DIM/DIM, or allow it with "
                f"allow={re.escape(path)}"
            )
        return None

    def axes(self, path: str, name: Any) -> tuple[str, ...]:
        """Mesh axes that the rules give to one dim name (or tuple of names)."""
        if name is None:
            return ()
        if isinstance(name, tuple):
            return tuple(a for part in name for a in self.axes(path, part))
        self.names_seen.add(name)
        if name not in self.rules:
            self.problems.append(
                f"{path}: no rule for dim {name!r} ({nearest(name, self.rules)}); add "
                f"params.{name}=AXIS or params.{name}=none to the layout"
            )
            return ()
        return tuple(a for a in self.rules[name] if self.sizes[a] > 1)

    def spec(self, path: str, param: Param) -> tuple[tuple | None, Spec, str]:
        """Names, axes per dim and the reason, for one parameter."""
        names = self.names(path, param)
        if names is None:
            why = "allowed: unnamed" if self.shards_params else "no axis shards it"
            return None, ((),) * len(param.shape), why
        spec, reasons = [], []
        for dim, (name, size) in enumerate(zip(names, param.shape, strict=True)):
            axes, why = self.axes(path, name), ""
            if FSDP in axes and param.size < self.layout.min_shard_size:
                axes = tuple(a for a in axes if a != FSDP)
                why = f" ({param.size} < min_shard_size={self.layout.min_shard_size})"
            if taken := [a for a in axes if any(a in other for other in spec)]:
                if not self.allowed(path):
                    self.problems.append(
                        f"{path} {dict(enumerate(names))}: two dims on axis "
                        f"{taken[0]!r}; map one to none (params.{name}=none), or keep "
                        f"the first with allow={re.escape(path)}"
                    )
                axes = tuple(a for a in axes if a not in taken)
                why = f" ({taken[0]} taken by an earlier dim, allowed)"
            ways = math.prod(self.sizes[a] for a in axes)
            if size % ways:
                if not self.allowed(path):
                    self.problems.append(
                        f"{path} {param.shape}: dim {dim} ({name}={size}) does not "
                        f"divide over {'*'.join(axes)}={ways}; change the size or the "
                        f"axis, map it to none (params.{name}=none), or allow it with "
                        f"allow={re.escape(path)}"
                    )
                axes, why = (), f" ({size} does not divide over {ways}, allowed)"
            spec.append(axes)
            reasons.append(f"{name or '-'}->{'*'.join(axes) or 'whole'}{why}")
        return names, tuple(spec), ", ".join(reasons)

    def finish(self, specs: Mapping[str, Spec]) -> None:
        """Adds what only the whole model shows, and raises if anything is wrong."""
        layout = self.layout
        for name, _ in layout.params:
            if name not in self.names_seen:
                known = nearest(name, self.names_seen)
                self.problems.append(f"rule params.{name} matches no dim ({known})")
        for regex, _ in layout.paths:
            if regex not in self.paths_used:
                self.problems.append(
                    f"path rule {regex!r} matches no unnamed parameter"
                )
        for regex in layout.allow:
            if regex not in self.allowances_used:
                self.problems.append(f"allowance {regex!r} allows nothing; remove it")
        used = {axis for spec in specs.values() for axes in spec for axis in axes}
        for axis in names_of(needs_sharded_params=True):
            if self.sizes[axis] > 1 and axis not in used:
                self.problems.append(
                    f"axis {axis}={self.sizes[axis]} shards no parameter; map a dim to "
                    f"it (params.DIM={axis}), lower min_shard_size, or use data instead"
                )
        if self.problems:
            raise LayoutError(
                f'layout "{layout}" does not fit the model:\n  '
                + "\n  ".join(self.problems)
            )


def _without_fsdp(spec: Spec) -> Spec:
    return tuple(tuple(a for a in axes if a != FSDP) for axes in spec)


def _reduced_spec(param: Param, spec: Spec, shape: tuple[int, ...]) -> Spec | None:
    """Spec of an optimizer leaf that lacks one dim of its parameter (Adafactor)."""
    found = {
        spec[:d] + spec[d + 1 :]
        for d in range(len(param.shape))
        if param.shape[:d] + param.shape[d + 1 :] == shape
    }
    return found.pop() if len(found) == 1 else None


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

    Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5 (what each level
      shards).
    """
    resolver, sizes = _Resolver(layout), layout.sizes
    resolved = {path: resolver.spec(path, param) for path, param in params.items()}
    full = {path: spec for path, (_, spec, _) in resolved.items()}
    resolver.finish(full)

    def leaf(path, kind, shape, dtype, names, spec, reason) -> LeafPlan:
        ways = math.prod(sizes[a] for axes in spec for a in axes)
        size = math.prod(shape) * np.dtype(dtype).itemsize // ways
        return LeafPlan(path, kind, tuple(shape), dtype, names, spec, reason, size)

    def dtype_inside(param: Param) -> Any:
        floats = jnp.issubdtype(param.dtype, jnp.floating)
        return compute_dtype if compute_dtype is not None and floats else param.dtype

    def follow(kind: str, shards_from: int) -> dict[str, LeafPlan]:
        plans = {}
        for path, param in params.items():
            names, spec, reason = resolved[path]
            if layout.zero_level < shards_from and spec != _without_fsdp(spec):
                spec = _without_fsdp(spec)
                reason += f"; whole over fsdp: zero={layout.zero_level}"
            dtype = param.dtype if kind == "parameter" else dtype_inside(param)
            plans[path] = leaf(path, kind, param.shape, dtype, names, spec, reason)
        return plans

    optimizer, specs = [], []
    leaves, treedef = tree_flatten_with_path(optimizer_state)
    for keys, value in leaves:
        path = next(
            (k.key for k in keys if isinstance(k, DictKey) and k.key in params), None
        )
        names, spec, reason = None, ((),) * len(value.shape), "no parameter's: whole"
        if path is not None:
            names, spec, reason = resolved[path]
            if value.shape != params[path].shape:
                names, reduced = None, _reduced_spec(params[path], spec, value.shape)
                spec = reduced or ((),) * len(value.shape)
                reason = f"{value.shape} of {path} {params[path].shape}: " + (
                    "less one dim" if reduced else "another shape, whole"
                )
        optimizer.append(
            leaf(
                keystr(keys), "optimizer", value.shape, value.dtype, names, spec, reason
            )
        )
        specs.append(partition_spec(spec))
    return Plan(
        layout=layout,
        parameters=follow("parameter", shards_from=1),
        weights=follow("weight", shards_from=3),
        gradients=follow("gradient", shards_from=2),
        optimizer=tuple(optimizer),
        optimizer_specs=tree_unflatten(treedef, specs),
    )
