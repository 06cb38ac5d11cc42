"""Predicts the memory of a training step on one device, by kind, without compiling.

State is exact (it is the plan's). Activations come from tracing one layer: what it
keeps for the backward pass, times the depth, and what it holds while it runs.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from meshpar import layouts
from meshpar.layouts import Layout
from meshpar.lowering import Lowering, model_scope


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device during a training step.

    Attributes:
      parameters: master weights.
      optimizer: optimizer state.
      weights: copies in the compute dtype.
      gradients: as the backward pass holds them.
      activations: kept by all layers for the backward pass.
      working: what one layer, or the head, holds while it runs backward: its whole
        weights, their gradient and its activations.
    """

    parameters: int
    optimizer: int
    weights: int
    gradients: int
    activations: int
    working: int

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(dataclasses.astuple(self))


def predict(lowering: Lowering, batch: Any) -> Memory | None:
    """Predicts a step's memory; None for models without stages.

    Args:
      lowering: explicit or automatic.
      batch: abstract global batch.
    """
    staged, plan = lowering.model.staged, lowering.plan
    if staged is None:
        return None
    state, layout = plan.bytes_per_device(), plan.layout
    copies = lowering.compute_dtype is not None or layout.zero < 3
    shared, stack = staged.split(
        {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for path, leaf in plan.weights.items()
        }
    )
    one = {p: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for p, x in stack.items()}
    rows = jax.tree.map(lambda x: _part(x, layout.microbatches), batch)
    ways = layout.num_batch_shards * layout.sizes["tensor"]
    with jax.set_mesh(lowering.mesh), model_scope(layout, lowering.mesh):
        key = jax.eval_shape(lambda: jax.random.key(0))

        def layer(weights: Any, x: Any, key: jax.Array) -> Any:
            return staged.layer(weights, x, key)

        def head(shared: Any, x: Any, rows: Any, key: jax.Array) -> jax.Array:
            return staged.head_loss(shared, x, rows, key)[0]

        x = jax.eval_shape(staged.embed, shared, rows, key)
        kept = _residuals(_remat(layer, layout), one, x, key) // ways
        running = _residuals(layer, one, x, key) // ways
        at_head = _residuals(head, shared, x, rows, key) // ways
    tensor = layout.sizes["tensor"]
    # Whole weights and their gradient, gathered or reduced.
    of_layer = 2 * _bytes(one) // tensor
    of_head = 3 * max((_bytes([x]) for x in shared.values()), default=0) // tensor
    return Memory(
        parameters=state["parameters"],
        optimizer=state["optimizer"],
        weights=state["weights"] if copies else 0,
        gradients=state["gradients"],
        activations=staged.depth * kept,
        working=max(of_layer + running, of_head + at_head),
    )


def _part(x: Any, ways: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[0] // ways, *x.shape[1:]), x.dtype)


def _remat(layer: Any, layout: Layout) -> Any:
    if layout.remat == "none":
        return layer
    return jax.checkpoint(layer, policy=layouts.REMAT_POLICIES[layout.remat]())


def _residuals(fn: Any, weights: Any, *args: Any) -> int:
    """Bytes that the backward pass of fn(weights, x, ...) keeps, weights aside."""

    def kept(weights: Any, x: Any, *rest: Any) -> list[jax.Array]:
        vjp = jax.vjp(lambda weights, x: fn(weights, x, *rest), weights, x)[1]
        leaves = jax.tree.leaves(vjp)
        own = jax.tree.leaves(weights)
        return [x for x in leaves if not any(x is w for w in own)]

    return _bytes(jax.eval_shape(kept, weights, *args))


def _bytes(tree: Any) -> int:
    return sum(
        math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
        for x in jax.tree.leaves(tree)
        if not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    )
