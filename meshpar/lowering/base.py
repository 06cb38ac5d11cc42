"""What both lowerings share: training state, clipping and the optimizer's step.

A lowering turns a model under a layout into the pure functions of one training step. It
says how gradients come about (`automatic`: the compiler inserts the collectives;
`explicit`: we do); the optimizer runs on shards in the same way under both.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.arrays import Params
from meshpar.contracts.collective import Collective
from meshpar.layouts.axes import REPLICA
from meshpar.layouts.layout import Layout
from meshpar.layouts.plan import Plan
from meshpar.layouts.scope import Scope, use
from meshpar.lowering.state import Metrics, TrainState
from meshpar.models.model import Model


@contextlib.contextmanager
def model_scope(
    layout: Layout, mesh: Mesh, manual_axes: Iterable[str] = ()
) -> Iterator[Scope]:
    """Runs a model under a layout: our `constrain`, and Flax's own logical rules."""
    manual_axes = frozenset(manual_axes)
    rules = tuple(
        (name, tuple(axis for axis in axes if axis not in manual_axes))
        for name, axes in layout.activation_rules.items()
    )
    with (
        use(layout, mesh, manual_axes) as scope,
        nn.logical_axis_rules(rules),
    ):
        yield scope


@dataclasses.dataclass(frozen=True)
class Lowering:
    """The pure functions of one training step.

    Attributes:
      model: the model.
      optimizer: the optimizer.
      plan: spec of every leaf.
      mesh: the device mesh.
      clip_norm: largest global gradient norm, or None.
      compute_dtype: dtype of the parameters inside the loss, or None for their own.
    """

    name: ClassVar[str]
    types_replicas: ClassVar[bool] = False
    """Whether what differs between replicas has to be marked so (check_vma)."""

    model: Model
    optimizer: optax.GradientTransformation
    plan: Plan
    mesh: Mesh
    clip_norm: float | None
    compute_dtype: Any

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axis along which steps run apart, manual already, or ()."""
        return (REPLICA,) if self.mesh.shape[REPLICA] > 1 else ()

    def gradients(self, state: TrainState, batch: Any) -> tuple[Metrics, Params]:
        """Loss, aux and gradients, sharded as the plan says, before clipping."""
        raise NotImplementedError

    @property
    def may_deadlock(self) -> bool:
        """Whether compiled programs have to pass `check_compiled` before they run."""
        return False

    def check_compiled(self, collectives: list[Collective]) -> None:
        """Raises MeshparError if the compiled step must not run."""

    def evaluate(self, state: TrainState, batch: Any) -> Metrics:
        """Loss and aux of the model in evaluation mode."""
        loss, aux = self.model.evaluation_loss(self.weights(state), batch)
        return {"loss": loss.astype(jnp.float32), **aux}

    def weights(self, state: TrainState) -> Params:
        """The copies that the loss uses: whole over fsdp below zero=3."""
        specs = {path: p.partition_spec for path, p in self.plan.weights.items()}
        return self.shard(self.cast(state.params), specs)

    def cast(self, params: Params) -> Params:
        """Parameters in the dtype of the loss."""
        if self.compute_dtype is None:
            return params
        return {
            path: x.astype(self.compute_dtype)
            if jnp.issubdtype(x.dtype, jnp.floating)
            else x
            for path, x in params.items()
        }

    def shard(self, tree: Params, specs: dict[str, PartitionSpec]) -> Params:
        """Constrains {path: array} to specs."""
        return {
            path: jax.lax.with_sharding_constraint(x, self.sharding(specs[path]))
            for path, x in tree.items()
        }

    def sharding(self, spec: PartitionSpec) -> NamedSharding | PartitionSpec:
        """A spec on this mesh, or on the one at hand, which knows its manual axes."""
        return spec if self.replica_axes else NamedSharding(self.mesh, spec)

    def train_step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One step of the optimizer, which runs on shards; adds grad_norm."""
        metrics, grads = self.gradients(state, batch)
        grads = self.shard(grads, self.plan.specs)
        grad_norm = optax.tree.norm(grads)
        if self.clip_norm is not None:
            scale = jnp.minimum(1.0, self.clip_norm / jnp.maximum(grad_norm, 1e-30))
            grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
        updates, optimizer_state = self.optimizer.update(
            grads, state.optimizer_state, state.params
        )
        params = optax.apply_updates(state.params, updates)
        new = TrainState(state.step + 1, state.seed, params, optimizer_state)
        return new, metrics | {"grad_norm": grad_norm}
