"""Probe of an optimizer: does it train layers alike that are stored in another order?

A pipeline may store layers reordered, and padded with zeros. Norms over a stack do not
see that, means and random numbers do. The probe runs the optimizer on small random
stacks in both forms.
"""

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
    shapes = _small_shapes(params, stack, partition.depth)
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
            return tree | {path: partition.store(tree[path]) for path in stack}

        kept, moved = changes(params, grads), changes(stored(params), stored(grads))
        restore = jax.vmap(partition.restore)
        return kept, moved | {path: restore(moved[path]) for path in stack}

    kept, moved = jax.device_get(jax.jit(both)(params, grads))
    return next((p for p in stack if not _are_equal(kept[p], moved[p])), "")


def _small_shapes(
    params: Mapping[str, Any], stack: Collection[str], depth: int
) -> dict[str, tuple[int, ...]]:
    """Small shapes whose sizes are in the order of the real ones; depths are real."""
    outer = {path: 1 if path in stack else 0 for path in params}
    sizes = {n for path, x in params.items() for n in x.shape[outer[path] :]}
    small = {n: 2 + rank if n > 1 else 1 for rank, n in enumerate(sorted(sizes))}
    return {
        path: (depth,) * outer[path] + tuple(small[n] for n in x.shape[outer[path] :])
        for path, x in params.items()
    }


def _are_equal(kept: np.ndarray, moved: np.ndarray) -> bool:
    """Whether all steps' updates are equal but for rounding, and not all zero."""
    kept, moved = (np.float64(x).reshape(len(x), -1) for x in (kept, moved))
    norms = np.linalg.norm(kept, axis=1)
    errors = np.linalg.norm(moved - kept, axis=1)
    return bool(norms.any() and (errors <= _TOLERANCE * norms).all())
