"""Gradient diversity: up to which batch size more rows per step do not slow learning.

The diversity of n rows is the sum of the squared norms of their gradients over the
squared norm of the sum of their gradients. SGD with the same learning rate per row (the
step is the sum over the batch) needs about as many rows for the same loss as long as a
batch has at most n times the diversity of rows. Rows that are repeated change neither.

Source: Yin, Pananjady, Lam, Papailiopoulos, Ramchandran, Bartlett, Gradient Diversity:
  a Key Ingredient for Scalable Distributed Learning, AISTATS 2018, arXiv:1706.05699,
  definition 1 and theorem 3.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.arrays import Array, Params
from meshpar.collectives.microbatch import split_microbatches
from meshpar.errors import MeshparError
from meshpar.lowering.state import TrainState
from meshpar.lowering.train_program import TrainProgram
from meshpar.metrics import masked
from meshpar.replicated import map_rows, num_rows


@dataclasses.dataclass(frozen=True)
class Diversity:
    """The two sums over the gradients of n rows, and what follows from them.

    Attributes:
      rows: n.
      squares: sum of the squared norms of the gradients.
      square_of_sum: squared norm of the sum of the gradients.
    """

    rows: int
    squares: float
    square_of_sum: float

    @property
    def diversity(self) -> float:
        """Between 1 / n, for equal gradients, and infinity."""
        return _over(self.squares, self.square_of_sum)

    @property
    def batch_bound(self) -> float:
        """The largest useful batch if these are all the data: n times the diversity.

        Gradients at right angles give n, equal ones 1.
        """
        return self.rows * self.diversity

    @property
    def estimated_bound(self) -> float:
        """The bound for the data of which these rows are a sample.

        The squared norm of a mean of few rows is too large by their variance, so that
        `batch_bound` is never above about n. This estimate takes that out; it is
        infinite where the rows are too few to tell.
        """
        pairs = (self.square_of_sum - self.squares) / (self.rows - 1)
        return _over(self.squares, max(pairs, 0.0))


def _over(a: float, b: float) -> float:
    return a / b if b > 0 else math.inf


def diversity_meter(
    program: TrainProgram, rows_at_once: int = 8
) -> Callable[[TrainState, Any], Diversity]:
    """Makes a function that measures gradient diversity beside a program's steps.

    It computes one gradient per row in evaluation mode, so that a call costs about a
    step, and the memory of `rows_at_once` gradients.

    Args:
      program: any program of `meshpar.lower`; its steps are left as they are.
      rows_at_once: rows whose gradients are computed together.

    Returns:
      (state, batch as for `program.step`) -> Diversity.

    Raises:
      MeshparError: the rows of a batch are no multiple of `rows_at_once`.
    """
    model, trained = program.model, program.plan.trained
    rows = num_rows(program.abstract_batch)
    if rows_at_once < 1 or rows % rows_at_once:
        raise MeshparError(
            f"rows_at_once={rows_at_once} for batches of {rows} rows: use a divisor"
        )

    def gradient(params: Params, batch: Any) -> tuple[Params, Array]:
        """The gradient of a row's loss times its weight, and the weight."""

        def loss(part: Params) -> tuple[Array, Array]:
            result = model.evaluation_loss(params | part, batch)
            weight = 1.0 if result.weight is None else result.weight
            weight = jax.lax.stop_gradient(jnp.float32(weight))
            return masked(weight, weight * result.loss.astype(jnp.float32)), weight

        return jax.grad(loss, has_aux=True)(trained(params))

    def sums(params: Params, batch: Any) -> tuple[Array, Array, Array]:
        """Sum of squares, square of the sum, and the sum of the weights."""

        def body(carry: tuple, rows: Any) -> tuple[tuple, None]:
            total, squares, weights = carry
            rows = map_rows(lambda x: x[:, None], rows)
            axes = map_rows(lambda _: 0, rows, others=lambda _: None)
            grads, weight = jax.vmap(gradient, (None, axes))(params, rows)
            grads = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
            total = jax.tree.map(lambda t, x: t + x.sum(axis=0), total, grads)
            return (total, squares + _square(grads), weights + weight.sum()), None

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained(params))
        start = zeros, jnp.float32(0), jnp.float32(0)
        parts = split_microbatches(batch, rows // rows_at_once)
        (total, squares, weights), _ = jax.lax.scan(body, start, parts)
        return squares, _square(total), weights

    compiled = jax.jit(sums)

    def measure(state: TrainState, batch: Any) -> Diversity:
        with jax.set_mesh(program.mesh):
            found = compiled(state.params, program.place_batch(batch))
        squares, square_of_sum, weights = map(float, found)
        mean_weight = weights / rows or 1.0
        return Diversity(rows, squares / mean_weight**2, square_of_sum / mean_weight**2)

    return measure


def _square(tree: Params) -> Array:
    """The squared norm of all arrays together."""
    return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree))
