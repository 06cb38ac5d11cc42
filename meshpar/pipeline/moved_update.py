"""Probe of an optimizer: does it train layers alike that are stored in another order?

A pipeline may store layers reordered, and padded with zeros. Norms over a stack do not
see that, means and random numbers do. The probe runs the optimizer on small random
stacks in both forms.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.arrays import Params
from meshpar.lowering.optimizer import Optimizer
from meshpar.pipeline.partition import Partition

_STEPS = 48
"""Steps of the probe: optimizers may wait for several gradients before an update."""

_SCALES = (1.0, 1e4, 1e-2)
"""Scales of the gradients, in turn: a threshold may act on large or small ones."""

_TOLERANCE = 1e-4
"""Largest relative difference that counts as rounding."""


def moved_update(
    optimizer: Optimizer,
    params: Mapping[str, Any],
    stack: Collection[str],
    partition: Partition,
) -> str:
    """The first stack whose updates depend on how layers are stored; "" if none.

    Elementwise optimizers without random numbers are not run.

    Args:
      optimizer: the optimizer.
      params: {path: ShapeDtypeStruct}, stacks as stored.
      stack: paths of the stacks.
      partition: says how they are stored.
    """
    if optimizer.reach.elementwise and not optimizer.reach.positional:
        return ""
    small = _small_partition(partition)
    shapes = _small_shapes(params, stack, partition.depth, small)
    rng = np.random.default_rng(0)
    params, grads = (
        {
            path: jnp.asarray(rng.normal(size=shape), params[path].dtype)
            for path, shape in shapes.items()
        }
        for _ in range(2)
    )

    def changes(params: Params, grads: Params) -> Params:
        """[steps, ...] updates."""
        nest = optimizer.nesting.nest
        params, grads = nest(params), nest(grads)
        run = optimizer.transformation

        def step(state: Any, scale: Any) -> tuple[Any, Any]:
            scaled = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
            loss = jnp.float32(1.0)
            updates, state = run.update(scaled, state, params, value=loss, grad=scaled)
            return state, updates

        scales = jnp.resize(jnp.array(_SCALES), _STEPS)
        updates = jax.lax.scan(step, run.init(params), scales)[1]
        return optimizer.nesting.flatten(updates)

    def both(params: Params, grads: Params) -> tuple[Params, Params]:
        def stored(tree: Params) -> Params:
            return tree | {path: small.store(tree[path]) for path in stack}

        kept, moved = changes(params, grads), changes(stored(params), stored(grads))
        restore = jax.vmap(small.restore)
        return kept, moved | {path: restore(moved[path]) for path in stack}

    kept, moved = jax.device_get(jax.jit(both)(params, grads))
    return next((p for p in stack if not _are_equal(kept[p], moved[p])), "")


def _small_partition(partition: Partition) -> Partition:
    """A partition of fewer layers that reorders and pads like this one."""
    uneven = len(set(partition.sizes)) > 1
    sizes = (1 + (uneven and size == partition.rows) for size in partition.sizes)
    return dataclasses.replace(partition, sizes=tuple(sizes))


def _small_shapes(
    params: Mapping[str, Any], stack: Collection[str], depth: int, small: Partition
) -> dict[str, tuple[int, ...]]:
    """Small shapes, with stacks in the order of the model.

    Sizes are in the order of the real ones, and those above the real depth are above
    the small ones: optimizers compare the dims of a tensor.
    """
    dims = {
        path: x.shape[1:] if path in stack else x.shape for path, x in params.items()
    }
    sizes = sorted({n for shape in dims.values() for n in shape} - {1})
    above = len(small.order)
    new = {n: 2 + i + above * (n >= depth) for i, n in enumerate(sizes)} | {1: 1}
    return {
        path: (small.depth,) * (path in stack) + tuple(new[n] for n in shape)
        for path, shape in dims.items()
    }


def _are_equal(kept: np.ndarray, moved: np.ndarray) -> bool:
    """Whether all steps' updates are equal but for rounding, and not all zero."""
    kept, moved = (np.float64(x).reshape(len(x), -1) for x in (kept, moved))
    norms = np.linalg.norm(kept, axis=1)
    errors = np.linalg.norm(moved - kept, axis=1)
    return bool(norms.any() and (errors <= _TOLERANCE * norms).all())
