"""Partitions of layers over pipeline stages: even, given, or balanced by cost.

Chunk v of stage p is position v * num_stages + p of the model, and in a V position
v * num_stages + num_stages - 1 - p for odd v. Every position has
`rows` rows in the stacked parameters, of which the last may be padding. An array
[depth, ...] in the model's order becomes [num_stages * num_chunks * rows, ...], stage
by stage, so that splitting its first dim over `pipe` gives every stage its chunks.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.arrays import abstract, abstract_layer
from meshpar.errors import LayoutError
from meshpar.models.model import Model
from meshpar.schedules.table import place


@dataclasses.dataclass(frozen=True)
class Partition:
    """The number of layers of every position of a pipeline.

    Attributes:
      num_stages: P, the size of the mesh axis `pipe`.
      num_chunks: V, chunks of layers per stage.
      sizes: layers of every position, in the order of the model.
      folded: whether chunks of odd numbers go from the last stage back to the first.
    """

    num_stages: int
    num_chunks: int
    sizes: tuple[int, ...]
    folded: bool = False

    @property
    def depth(self) -> int:
        """Layers of the model."""
        return sum(self.sizes)

    @property
    def rows(self) -> int:
        """Rows of a chunk: the layers of the largest one."""
        return max(self.sizes)

    @property
    def order(self) -> np.ndarray:
        """[P * V * rows] the layer in every row as stored; -1 for padding."""
        starts = [0, *itertools.accumulate(self.sizes)]
        stored = np.full((self.num_stages, self.num_chunks, self.rows), -1, np.int32)
        for position, size in enumerate(self.sizes):
            chunk, stage = place(position, self.num_stages, self.folded)
            start = starts[position]
            stored[stage, chunk, :size] = np.arange(start, start + size)
        return stored.reshape(-1)

    @functools.cached_property
    def moves(self) -> bool:
        """Whether layers are stored in another order than the model's, or padded."""
        return not np.array_equal(self.order, np.arange(self.depth))

    def store(self, x: jax.Array) -> jax.Array:
        """Rows as stored from [depth, ...] in the model's order; padding is 0."""
        order = self.order
        rows = jnp.take(x, np.maximum(order, 0), axis=0)
        real = (order >= 0).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(real, rows, jnp.zeros_like(rows))

    def restore(self, x: jax.Array) -> jax.Array:
        """[depth, ...] in the model's order from rows as stored."""
        order = self.order
        rows = np.argsort(np.where(order < 0, len(order), order), kind="stable")
        return jnp.take(x, rows[: self.depth], axis=0)


def make_partition(
    depth: int,
    num_stages: int,
    num_chunks: int = 1,
    sizes: Sequence[int] = (),
) -> Partition:
    """Makes a partition of the given sizes, or of sizes as even as possible.

    Args:
      depth: layers of the model.
      num_stages: P, the size of the mesh axis `pipe`.
      num_chunks: V, chunks of layers per stage.
      sizes: layers of every position; empty for an even partition.

    Raises:
      LayoutError: there are fewer layers than positions, or the sizes are not one per
        position, at least 1 each and `depth` in all.
    """
    positions = num_stages * num_chunks
    if depth < positions:
        raise LayoutError(
            f"pipe={num_stages},virtual_stages={num_chunks} makes {positions} chunks "
            f"of {depth} layers: use fewer stages, or a deeper model"
        )
    if not sizes:
        sizes = balanced_sizes([1.0] * depth, positions)
    if len(sizes) != positions or sum(sizes) != depth or min(sizes) < 1:
        raise LayoutError(
            f"partition={'/'.join(map(str, sizes))}: give {positions} numbers of "
            f"layers, one for each of pipe={num_stages} * virtual_stages={num_chunks} "
            f"chunks, at least 1 each and {depth} in all"
        )
    return Partition(num_stages, num_chunks, tuple(sizes))


class Costs(NamedTuple):
    """FLOPs of a forward pass: embedding, one layer, head with loss."""

    embed: float
    layer: float
    head: float


def measured_costs(model: Model, batch: Any) -> Costs:
    """Costs of a model's parts, by XLA's cost analysis of their forward passes.

    Use them as `balanced_sizes([costs.layer] * depth, P, costs.embed, costs.head)`.

    Args:
      model: a model with layers.
      batch: pytree of arrays or ShapeDtypeStructs; only shapes matter.

    Raises:
      LayoutError: the model has no layered form.
    """
    if (layered := model.layered) is None:
        raise LayoutError(
            "the model has no layered form: name its layers by layers=, or give "
            "from_nnx a meshpar.LayerStack"
        )
    shared, stack = layered.split(abstract(model.params))
    layer = abstract_layer(stack)
    x = jax.eval_shape(lambda p, b: layered.embed(p, b, None), shared, batch)
    context = jax.eval_shape(lambda p, b: layered.context(p, b, None), shared, batch)

    def flops(fn: Callable[..., Any], *args: Any) -> float:
        analysis = jax.jit(fn).lower(*args).compile().cost_analysis()
        return float(analysis.get("flops", 0.0))

    return Costs(
        flops(lambda p, b: layered.embed(p, b, None), shared, batch),
        flops(lambda p, x, c: layered.layer(p, x, None, c), layer, x, context),
        flops(lambda p, x, b: layered.head_loss(p, x, b, None)[0], shared, x, batch),
    )


def balanced_sizes(
    costs: Sequence[float], positions: int, first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """Cuts layers into runs such that the most expensive run costs least.

    Args:
      costs: cost c_i of every layer, in any unit.
      positions: number of runs; at most the number of layers.
      first: cost of the embedding, which is added to the first run.
      last: cost of the head, which is added to the last run.

    Returns:
      Layers of every run; among equally good cuts those of the most even one.

    Raises:
      LayoutError: there are more runs than layers.

    Source: Huang et al., GPipe, arXiv:1811.06965, section 2.1 (estimates c_i, and a
      partition that minimizes the variance of the runs' costs).
    """
    depth, sums = len(costs), [0.0, *itertools.accumulate(costs)]
    if not 1 <= positions <= depth:
        raise LayoutError(
            f"{depth} layers cannot be cut into {positions} runs; use 1 to {depth}"
        )
    # best[n][i]: (largest cost, sum of squared costs) of i layers cut into n runs.
    worst = float("inf"), float("inf")
    best = [[worst] * (depth + 1) for _ in range(positions + 1)]
    cut = [[0] * (depth + 1) for _ in range(positions + 1)]
    best[0][0] = 0.0, 0.0
    for n in range(1, positions + 1):
        extra = first * (n == 1) + last * (n == positions)
        for i in range(n, depth + 1):
            for j in reversed(range(n - 1, i)):
                cost = sums[i] - sums[j] + extra
                if cost > best[n][i][0]:
                    break  # So are all longer runs.
                largest, squares = best[n - 1][j]
                score = max(largest, cost), squares + cost * cost
                if score <= best[n][i]:
                    best[n][i], cut[n][i] = score, j
    sizes, end = [], depth
    for n in range(positions, 0, -1):
        start = cut[n][end]
        sizes.append(end - start)
        end = start
    return tuple(reversed(sizes))
