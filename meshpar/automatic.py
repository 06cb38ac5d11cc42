"""The automatic lowering: jit, with every mesh axis automatic.

Training state carries the shardings of the plan, activations carry the model's
constraints, and the compiler inserts the collectives. ZeRO is a matter of what is
sharded over `fsdp`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar import layouts, microbatch
from meshpar.flax_models import Model, Params
from meshpar.layouts import Layout
from meshpar.plan import Plan

Metrics = dict[str, jax.Array]


class TrainState(NamedTuple):
    """All that training carries from step to step.

    Attributes:
      step: steps done, int32 scalar.
      seed: seed of the run, uint32 scalar; dropout keys follow from seed and step.
      params: {path: array}.
      optimizer_state: the optax state.
    """

    step: jax.Array
    seed: jax.Array
    params: Params
    optimizer_state: Any


@contextlib.contextmanager
def model_scope(layout: Layout, mesh: Mesh) -> Iterator[layouts.Scope]:
    """Runs a model under a layout: our `constrain`, and Flax's own logical rules."""
    rules = tuple(layout.activation_rules.items())
    with layouts.use(layout, mesh) as scope, nn.logical_axis_rules(rules):
        yield scope


@dataclasses.dataclass(frozen=True)
class Automatic:
    """The pure functions of one training step, to be traced under `model_scope`.

    Attributes:
      model: the model.
      optimizer: the optimizer.
      plan: spec of every leaf.
      mesh: the device mesh.
      clip_norm: largest global gradient norm, or None.
      compute_dtype: dtype of the parameters inside the loss, or None for their own.
    """

    model: Model
    optimizer: optax.GradientTransformation
    plan: Plan
    mesh: Mesh
    clip_norm: float | None
    compute_dtype: Any

    def _cast(self, params: Params) -> Params:
        if self.compute_dtype is None:
            return params
        return {
            path: x.astype(self.compute_dtype)
            if jnp.issubdtype(x.dtype, jnp.floating)
            else x
            for path, x in params.items()
        }

    def _shard(self, tree: Params, specs: dict[str, PartitionSpec]) -> Params:
        return {
            path: jax.lax.with_sharding_constraint(
                x, NamedSharding(self.mesh, specs[path])
            )
            for path, x in tree.items()
        }

    def gradients(self, state: TrainState, batch: Any) -> tuple[Metrics, Params]:
        """Loss, aux and gradients, sharded as the plan says, before clipping."""
        key = jax.random.fold_in(jax.random.key(state.seed), state.step)
        specs = {path: p.partition_spec for path, p in self.plan.gradients.items()}

        def loss_fn(params: Params, batch: Any, key: jax.Array):
            loss, aux = self.model.loss(self._cast(params), batch, key)
            return loss.astype(jnp.float32), aux

        def one(batch: Any, key: jax.Array) -> tuple[Metrics, Params]:
            with_aux = jax.value_and_grad(loss_fn, has_aux=True)
            (loss, aux), grads = with_aux(state.params, batch, key)
            return {"loss": loss, **aux}, self._shard(grads, specs)

        if self.plan.layout.microbatches == 1:
            return one(batch, key)
        return self._accumulate(one, batch, key, state.params, specs)

    def _accumulate(
        self,
        one: Callable[[Any, jax.Array], tuple[Metrics, Params]],
        batch: Any,
        key: jax.Array,
        params: Params,
        specs: dict[str, PartitionSpec],
    ) -> tuple[Metrics, Params]:
        """Means over microbatches, each weighted by its aux["weight"] (1 without)."""
        num = self.plan.layout.microbatches
        split = NamedSharding(self.mesh, PartitionSpec(None, layouts.BATCH_AXES))
        batches = jax.lax.with_sharding_constraint(microbatch.split(batch, num), split)
        first = jax.tree.map(lambda x: x[0], batches)
        metrics, _ = jax.eval_shape(one, first, key)
        weighted = "weight" in metrics

        def body(sums: Any, m_batch: tuple[jax.Array, Any]) -> tuple[Any, None]:
            m, batch = m_batch
            metrics, grads = one(batch, jax.random.fold_in(key, m))
            weight = jnp.float32(metrics.pop("weight", 1.0))
            new = weight, *jax.tree.map(lambda x: weight * x, (metrics, grads))
            total = jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, new)
            return (*total[:2], self._shard(total[2], specs)), None

        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, jnp.float32),
            ({k: v for k, v in metrics.items() if k != "weight"}, params),
        )
        sums = jnp.zeros((), jnp.float32), zeros[0], self._shard(zeros[1], specs)
        sums, _ = jax.lax.scan(body, sums, (jnp.arange(num), batches))
        weight, metrics, grads = sums[0], *jax.tree.map(lambda x: x / sums[0], sums[1:])
        grads = {path: g.astype(params[path].dtype) for path, g in grads.items()}
        return metrics | ({"weight": weight} if weighted else {}), grads

    def evaluate(self, state: TrainState, batch: Any) -> Metrics:
        """Loss and aux of the model in evaluation mode."""
        loss, aux = self.model.evaluation_loss(self._cast(state.params), batch)
        return {"loss": loss.astype(jnp.float32), **aux}

    def train_step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One step of the optimizer, which runs on shards; adds grad_norm."""
        metrics, grads = self.gradients(state, batch)
        grads = self._shard(grads, self.plan.update_specs)
        grad_norm = optax.tree.norm(grads)
        if self.clip_norm is not None:
            scale = jnp.minimum(1.0, self.clip_norm / jnp.maximum(grad_norm, 1e-30))
            grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
        params = self._shard(state.params, self.plan.update_specs)
        updates, optimizer_state = self.optimizer.update(
            grads, state.optimizer_state, params
        )
        params = optax.apply_updates(params, updates)
        new = TrainState(state.step + 1, state.seed, params, optimizer_state)
        return new, metrics | {"grad_norm": grad_norm}
