"""A stack of layers as one function, which jax differentiates by `LayerScan.backward`.

Consecutive layers that save alike for their backward pass are a segment, with a scan of
its own.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshpar.arrays import Array, Params, vary
from meshpar.fsdp.layer_scan import LayerScan
from meshpar.fsdp.rows import Rows
from meshpar.fsdp.saved import Residuals
from meshpar.mesh.order import computed


class Segment(NamedTuple):
    """Consecutive layers that one scan runs.

    Attributes:
      layers: runs them, rows of a stack in which row i is layer i.
      count: number of layers.
    """

    layers: LayerScan
    count: int


def differentiable(*segments: Segment) -> Callable[..., Any]:
    """The whole stack as a function that jax differentiates by `LayerScan.backward`.

    With sums, each layer's gradient is added in place to its row of them, and no stack
    of gradients is held beside them. The function is then differentiated by the sums,
    and not by the leaves: their "gradient" is the sums with this gradient added.
    Without sums, several segments add their gradients to zeros of the whole stack.

    Args:
      *segments: all layers of the stack, in the order in which they run.

    Returns:
      (leaves {path: [depth, ...]}, constants {path: [depth, ...]}, x, sums {path:
      [depth, ...]} or None) -> x.
    """

    @jax.custom_vjp
    def run(
        leaves: Params, constants: Params, x: Any, sums: Params | None = None
    ) -> Any:
        for layers, rows in _with_rows(segments):
            x = layers.run(leaves, constants, x, rows)
        return x

    def forward(
        leaves: Params, constants: Params, x: Any, sums: Params | None
    ) -> tuple[Any, Any]:
        saved: list[Residuals] = []
        for layers, rows in _with_rows(segments):
            x, residuals = layers.forward(leaves, constants, x, rows)
            saved.append(residuals)
        return x, (leaves, constants, saved, sums)

    def backward(residuals: Any, dx: Any) -> tuple[Params | None, None, Any, Any]:
        leaves, constants, saved, sums = residuals
        dleaves = sums
        if sums is None and len(segments) > 1:
            dleaves = {path: _zeros_like(x) for path, x in leaves.items()}
        pairs = zip(_with_rows(segments), saved, strict=True)
        for (layers, rows), own in reversed(list(pairs)):
            weights, depth = (leaves, constants), len(rows.numbers)
            is_alone = depth == 1 and len(segments) > 1
            if is_alone or layers.is_written_out(depth):
                # Compilers write a loop of one round out, too. Without a loop they
                # would share what it gathers and computes with the forward pass. Of
                # what is saved, fusions need less than all if nothing is repeated.
                if layers.repeats:
                    weights, own, dx = computed((weights, own, dx))
                else:
                    weights, dx = computed((weights, dx))
            dx, dleaves = layers.backward(*weights, own, dx, rows, dleaves)
        return (dleaves, None, dx, None) if sums is None else (None, None, dx, dleaves)

    run.defvjp(forward, backward)
    return run


def _with_rows(segments: Sequence[Segment]) -> Iterator[tuple[LayerScan, Rows]]:
    """(scan, its rows of the stack) of every segment."""
    start = 0
    for layers, count in segments:
        yield layers, Rows(start, jnp.arange(start, start + count))
        start += count


def _zeros_like(x: Array) -> Array:
    """Zeros that differ over the manual axes over which x differs."""
    return vary(jnp.zeros_like(x), tuple(jax.typeof(x).manual_axis_type.varying))
