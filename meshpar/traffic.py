"""What each lowering declares: the terms of its contract, with bytes and reasons."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshpar import cost, fsdp
from meshpar.contract import Contract, Term
from meshpar.explicit import Explicit
from meshpar.fsdp import Placement
from meshpar.lowering import Lowering

Shapes = dict[str, jax.ShapeDtypeStruct]

_SUBLAYERS = 2
_FORWARD, _BACKWARD, _OUTSIDE = 3, 8, 24
"""Gathers of the activations that one sublayer, and embedding with head, may cost.

Megatron's sequence parallelism needs a gather before and a reduce_scatter after each
sublayer. A compiler may reduce whole (twice as dear), and going backward once for each
of up to three projections that read the same input.
"""


def declare(lowering: Lowering, batch: Any, num_metrics: int) -> Contract:
    """The contract of one training step.

    Args:
      lowering: explicit or automatic.
      batch: abstract global batch.
      num_metrics: scalars that the gradient function returns beside the gradients.
    """
    terms = [*_scalars(lowering)]
    if isinstance(lowering, Explicit):
        terms += [*_gradient_terms(lowering, num_metrics)]
        terms += [*_tensor_terms(lowering, batch)]
    else:
        used = tuple(a for a, n in lowering.mesh.shape.items() if n > 1)
        if used:
            why = "lowering=jit: the compiler chooses"
            terms.append(
                Term("any", used, _ways(lowering, used), 0, math.inf, why, True)
            )
    return Contract(tuple(terms))


def _ways(lowering: Lowering, axes: Iterable[str]) -> int:
    return math.prod(lowering.mesh.shape[axis] for axis in axes)


def _scalars(lowering: Lowering) -> Iterator[Term]:
    """Global norm, and means of an optimizer that reduces over whole tensors."""
    used = tuple(a for a, n in lowering.mesh.shape.items() if n > 1)
    if not used:
        return
    plan, size = lowering.plan, 8 * len(lowering.plan.parameters)
    whole = {leaf.shape for leaf in plan.parameters.values()}
    for leaf in plan.optimizer:
        if leaf.shape and leaf.shape not in whole:
            size += 2 * math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
    why = "global norm, and the optimizer's means over whole tensors"
    yield Term("all_reduce", used, _ways(lowering, used), 0, size, why, True)


class _Declared:
    """Counts the collectives that `fsdp` makes of a dict of tensors."""

    def __init__(self, lowering: Explicit):
        self.lowering = lowering

    def local(
        self, x: jax.ShapeDtypeStruct, placement: Placement
    ) -> jax.ShapeDtypeStruct:
        """What one device moves of a tensor: its shard over the automatic axes."""
        shape = list(x.shape)
        for dim, entry in enumerate(placement.automatic):
            shape[dim] //= _ways(self.lowering, _axes(entry))
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    def split_terms(
        self,
        kind: str,
        shapes: Shapes,
        placements: Mapping[str, Placement],
        runs: int,
        why: str,
    ) -> Iterator[Term]:
        """Gathers or reduce_scatters of whole tensors over the axes that split them."""
        rings = kind == "reduce_scatter" and self.lowering.rings
        found: dict[tuple, list[int]] = {}
        split = {
            path: self.local(x, placements[path])
            for path, x in shapes.items()
            if placements[path].splits
        }
        for axes in dict.fromkeys(placements[path].axes for path in split):
            group = {p: x for p, x in split.items() if placements[p].axes == axes}
            for paths in fsdp.buckets(group, placements, 1):
                for stage_axes, size in self._stages(kind, paths, group, placements):
                    total = found.setdefault(stage_axes, [0, 0])
                    total[0] += 1
                    total[1] += size
        for axes, (count, size) in found.items():
            ways, kind_found = _ways(self.lowering, axes), kind
            if rings and len(axes) == 1:
                rows = fsdp.ring_rows(ways)
                count *= rows + ways // rows - 2
                size = size // ways * (ways - 1)
                kind_found, why_found = "permute", f"{why}, around rings"
            else:
                why_found = why
            yield Term(kind_found, axes, ways, runs * count, runs * size, why_found)

    def _stages(
        self,
        kind: str,
        paths: list[str],
        shapes: Shapes,
        placements: Mapping[str, Placement],
    ) -> Iterator[tuple[tuple[str, ...], int]]:
        """(axes, bytes) of every collective that makes one bucket whole."""
        if len(paths) > 1:
            axes, dtype = placements[paths[0]].axes, shapes[paths[0]].dtype
            ways = _ways(self.lowering, axes)
            size = sum(math.prod(shapes[path].shape) for path in paths)
            if kind == "reduce_scatter":
                size += ways * fsdp.padding(size // ways)
            yield axes, size * jnp.dtype(dtype).itemsize
            return
        (path,) = paths
        size = _bytes(shapes[path])
        for _, axes in reversed(placements[path].splits):
            yield axes, size
            size //= _ways(self.lowering, axes)

    def reduced_terms(
        self, shards: Shapes, placements: Mapping[str, Placement], why: str
    ) -> Iterator[Term]:
        """All_reduces of shards over the axes that do not split them."""
        for axes in dict.fromkeys(placements[path].rest for path in shards):
            group = {
                path: self.local(x, placements[path])
                for path, x in shards.items()
                if placements[path].rest == axes
            }
            if not axes:
                continue
            count = sum(1 for _ in fsdp.buckets(group, placements, 1))
            size = sum(map(_bytes, group.values()))
            yield Term("all_reduce", axes, _ways(self.lowering, axes), count, size, why)


def _bytes(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.shape) * jnp.dtype(x.dtype).itemsize


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _gradient_terms(lowering: Explicit, num_metrics: int) -> Iterator[Term]:
    """What the explicit lowering moves over the batch axes."""
    if not lowering.manual_axes:
        return
    layout, plan, staged = lowering.plan.layout, lowering.plan, lowering.model.staged
    zero, num, depth = layout.zero, layout.microbatches, staged.depth
    declared, placements = _Declared(lowering), lowering.placements

    def shapes(dtype: Any = None, sharded: bool = False) -> Shapes:
        made = {}
        for path, leaf in plan.weights.items():
            shape = list(leaf.shape)
            for dim, axes in placements[path].splits if sharded else ():
                shape[dim] //= _ways(lowering, axes)
            kind = dtype or lowering.wire_dtype(leaf.dtype)
            made[path] = jax.ShapeDtypeStruct(tuple(shape), kind)
        return made

    def both(
        kind: str, times: int, why: str, passes: Iterable[str], dtype: Any = None
    ) -> Iterator[Term]:
        shared, stack = staged.split(shapes(dtype))
        outside = f"{why}: embedding, head and the like"
        yield from declared.split_terms(kind, shared, placements, times, outside)
        stack = {
            p: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for p, x in stack.items()
        }
        layers, ahead = lowering.layer_placements, {}
        if kind == "all_gather":
            ahead = {p: stack.pop(p) for p in lowering.prefetched}
        for name in passes:
            inside = f"{why}: layer by layer, {name}"
            yield from declared.split_terms(kind, stack, layers, times * depth, inside)
            early, runs = f"{why}: one layer ahead, {name}", times * (depth + 1)
            yield from declared.split_terms(kind, ahead, layers, runs, early)

    added = jnp.float32 if num > 1 else None
    if lowering.gathers_layers:
        yield from both(
            "all_gather", num, f"zero={zero}: weights", ("forward", "backward")
        )
    else:
        why = f"zero={zero}: weights gathered once a step"
        yield from declared.split_terms("all_gather", shapes(), placements, 1, why)
    if lowering.reduces_early:
        yield from both("reduce_scatter", num, f"zero={zero}: gradients", ("backward",))
    else:
        why, after = f"zero={zero}: gradients, once a step", ("after backward",)
        yield from both("reduce_scatter", 1, why, after, added)
    why = "gradients, over the axes that replicate the tensor"
    yield from declared.reduced_terms(shapes(added, sharded=True), placements, why)
    manual = lowering.manual_axes
    ways, size = _ways(lowering, manual), 4 * num_metrics
    yield Term("all_reduce", manual, ways, 1, size, "loss and metrics")


def _tensor_terms(lowering: Explicit, batch: Any) -> Iterator[Term]:
    """A bound on what the compiler moves for tensor parallelism."""
    axes = tuple(
        axis
        for axis, size in lowering.mesh.shape.items()
        if size > 1 and axis not in lowering.manual_axes
    )
    if not axes:
        return
    staged, layout = lowering.model.staged, lowering.plan.layout
    params = {
        p: jax.ShapeDtypeStruct(w.shape, w.dtype)
        for p, w in lowering.plan.weights.items()
    }
    x = jax.eval_shape(lambda p, b: staged.embed(p, b, None), params, batch)
    size = sum(
        _bytes(leaf.update(dtype=lowering.wire_dtype(leaf.dtype)))
        for leaf in jax.tree.leaves(x)
    )
    ways = _ways(lowering, axes)
    unit = cost.wire_bytes("all_gather", size // layout.num_batch_shards, ways)
    recomputed = _FORWARD if layout.remat != "none" else 0
    sublayers = staged.depth * _SUBLAYERS
    units = sublayers * (_FORWARD + _BACKWARD + recomputed) + _OUTSIDE
    why = f"activations: at most {units} gathers of {unit:.0f} bytes"
    yield Term("any", axes, ways, 0, int(units * unit), why, True)
