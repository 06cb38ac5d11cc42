"""The jit lowering: every mesh axis is automatic, XLA inserts the collectives.

Training state carries the shardings of the plan, activations carry the model's
constraints. ZeRO follows from the specs of weights, gradients and optimizer state.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.arrays import Array, Params
from meshpar.collectives.microbatch import split_microbatches
from meshpar.contracts.contract import DeclaredCollective
from meshpar.layouts.layout import Layout
from meshpar.layouts.plan import partition_spec
from meshpar.lowering.base import Lowering
from meshpar.lowering.state import Metrics, TrainState
from meshpar.models.model import Model


@dataclasses.dataclass(frozen=True)
class JitLowering(Lowering):
    """Leaves the collectives to the compiler; works for every model."""

    name = "jit"

    @classmethod
    def reason_unsupported(cls, model: Model, layout: Layout) -> str:
        """Why a model cannot be lowered so under a layout; "" if it can."""
        del model
        if layout.pipe > 1:
            return f"pipe={layout.pipe}: the compiler makes no pipeline"
        if layout.prefetch:
            return (
                f"prefetch={layout.prefetch[0]}: the compiler schedules the gathers of "
                "lowering=jit"
            )
        return ""

    def declared(self, batch: Any, num_metrics: int) -> Iterator[DeclaredCollective]:
        """The collectives of one training step, without a bound."""
        yield from super().declared(batch, num_metrics)
        if axes := self.axes_in_use:
            why = "lowering=jit: the compiler chooses"
            yield DeclaredCollective(
                "any", axes, self.ways(axes), 0, math.inf, why, bound=True
            )

    def gradients(self, state: TrainState, batch: Any) -> tuple[Metrics, Params]:
        """Loss, aux and gradients, sharded as the plan says, before clipping."""
        key, weights = state.key(), self.weights(state.params)
        trained = self.plan.trained(weights)
        specs = {path: p.partition_spec for path, p in self.plan.gradients.items()}

        def loss_fn(params: Params, batch: Any, key: Array):
            loss, aux = self.model.loss(weights | params, batch, key)
            return loss.astype(jnp.float32), aux

        def microbatch(batch: Any, key: Array) -> tuple[Metrics, Params]:
            with_aux = jax.value_and_grad(loss_fn, has_aux=True)
            (loss, aux), grads = with_aux(trained, batch, key)
            grads = {k: g.astype(state.params[k].dtype) for k, g in grads.items()}
            return {"loss": loss, **aux}, self.shard(grads, specs)

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
        microbatch: Callable[[Any, Array], tuple[Metrics, Params]],
        batch: Any,
        key: Array,
        params: Params,
        specs: dict[str, PartitionSpec],
    ) -> tuple[Metrics, Params]:
        """Means over microbatches, each weighted by its aux["weight"] (1 without)."""
        num = self.plan.layout.microbatches
        batches = jax.tree.map(self._split_rows, split_microbatches(batch, num))
        first = jax.tree.map(lambda x: x[0], batches)
        metrics, _ = jax.eval_shape(microbatch, first, key)
        weighted = "weight" in metrics

        def body(sums: Any, m_batch: tuple[Array, Any]) -> tuple[Any, None]:
            m, batch = m_batch
            metrics, grads = microbatch(batch, jax.random.fold_in(key, m))
            weight = jnp.float32(metrics.pop("weight", 1.0))
            new = weight, *jax.tree.map(lambda x: weight * x, (metrics, grads))
            total = jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, new)
            return (*total[:2], self.shard(total[2], specs)), None

        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, jnp.float32),
            ({k: v for k, v in metrics.items() if k != "weight"}, params),
        )
        sums = jnp.zeros((), jnp.float32), zeros[0], self.shard(zeros[1], specs)
        sums, _ = jax.lax.scan(body, sums, (jnp.arange(num), batches))
        weight, metrics, grads = sums[0], *jax.tree.map(lambda x: x / sums[0], sums[1:])
        grads = {path: g.astype(params[path].dtype) for path, g in grads.items()}
        return metrics | ({"weight": weight} if weighted else {}), grads
