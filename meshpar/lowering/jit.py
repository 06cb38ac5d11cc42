"""The jit lowering: every mesh axis is automatic, XLA inserts the collectives.

Training state carries the shardings of the plan, activations carry the model's
constraints. ZeRO follows from the specs of weights, gradients and optimizer state.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.arrays import Array, Params
from meshpar.collectives.microbatch import split_microbatches
from meshpar.collectives.shard_keys import for_microbatch, for_shard
from meshpar.contracts.declared import DeclaredCollective
from meshpar.layouts.plan import partition_spec
from meshpar.layouts.refusals.combination import JIT
from meshpar.layouts.row_draws import Draws
from meshpar.lowering.base import Lowering
from meshpar.lowering.state import TrainState
from meshpar.lowering.totals import Gradients, Totals
from meshpar.metrics import LossResult, masked
from meshpar.replicated import map_rows, num_rows


@dataclasses.dataclass(frozen=True)
class JitLowering(Lowering):
    """Leaves the collectives to the compiler; works for every model.

    Attributes:
      averaged: paths of the state whose new value is the mean of what the microbatches
        make of it; of other state they all make the same.
      draws: which random numbers of the loss belong to rows.
    """

    name = JIT

    averaged: frozenset[str]
    draws: Draws = Draws()

    def bounds(
        self, batch: Any, written: Sequence[DeclaredCollective]
    ) -> Iterator[DeclaredCollective]:
        """Collectives that compilers add to a step under jit: without a bound."""
        yield from super().bounds(batch, written)
        yield from self.declared_freely()

    def declared_freely(self) -> Iterator[DeclaredCollective]:
        """Any collectives over the axes in use, without a bound."""
        if axes := self.axes_in_use:
            why = "lowering=jit: the compiler chooses"
            yield DeclaredCollective(
                "any", axes, self.ways(axes), 0, math.inf, why, bound=True
            )

    def gradients(self, state: TrainState, batch: Any) -> Gradients:
        """Totals of the batch and gradients, sharded as the plan says."""
        key, weights = state.key(), self.copies(state.params)
        trained = self.plan.trained(weights)
        specs = {path: p.partition_spec for path, p in self.plan.gradients.items()}

        def loss_fn(params: Params, batch: Any, key: Array) -> tuple[Array, LossResult]:
            result = self.model.loss(self.gathered(weights | params), batch, key)
            return result.loss.astype(jnp.float32), result

        def microbatch(batch: Any, key: Array) -> Gradients:
            with_aux = jax.value_and_grad(loss_fn, has_aux=True)
            (_, result), grads = with_aux(trained, batch, key)
            totals = Totals.of(result)
            grads = {
                k: masked(totals.weight, g).astype(state.params[k].dtype)
                for k, g in grads.items()
            }
            return Gradients(totals, self.shard(grads, specs), result.state)

        if self.plan.layout.microbatches == 1:
            return microbatch(batch, key)
        return self._accumulate(
            microbatch, batch, key, self.plan.trained(state.params), specs
        )

    def _split_rows(self, x: Array) -> Array:
        """Microbatches [M, B/M, ...] split over the mesh as a batch is."""
        spec = partition_spec(((), *self.layout.batch_spec(x.ndim - 1)))
        return jax.lax.with_sharding_constraint(x, self.sharding(spec))

    def _accumulate(
        self,
        microbatch: Callable[[Any, Array], Gradients],
        batch: Any,
        key: Array,
        params: Params,
        specs: dict[str, PartitionSpec],
    ) -> Gradients:
        """Totals, means of gradients by weight, and state of the microbatches."""
        num = self.plan.layout.microbatches
        batches = map_rows(self._split_rows, split_microbatches(batch, num))
        first = jax.tree.map(lambda x: x[0], batches)
        rows = num_rows(batch)
        keys = for_shard(key, jnp.uint32(0), rows, draws=self.draws)

        def body(sums: Gradients, m_batch: tuple[Array, Any]) -> tuple[Any, None]:
            m, batch = m_batch
            totals, new, state = microbatch(batch, for_microbatch(keys, m, num))
            grads = {
                path: x + (totals.divisor * new[path]).astype(x.dtype)
                for path, x in sums.gradients.items()
            }
            state = {
                path: x + state[path] / num if path in self.averaged else state[path]
                for path, x in sums.state.items()
            }
            totals = sums.totals.added(totals.last_where(m == num - 1))
            return Gradients(totals, self.shard(grads, specs), state), None

        shapes = jax.eval_shape(
            microbatch, first, for_microbatch(keys, jnp.int32(0), num)
        )
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        state = {path: jnp.zeros(x.shape, x.dtype) for path, x in shapes.state.items()}
        sums = Gradients(shapes.totals.empty(), self.shard(zeros, specs), state)
        sums, _ = jax.lax.scan(body, sums, (jnp.arange(num), batches))
        weight = sums.totals.nonzero_divisor
        grads = {
            path: (x / weight).astype(params[path].dtype)
            for path, x in sums.gradients.items()
        }
        return sums._replace(gradients=grads)
