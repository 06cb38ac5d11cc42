"""The lowering protocol: from a model under a layout to the functions of one step.

A lowering computes gradients (`jit`: the compiler inserts the collectives; `shard_map`:
we write them). It bounds what compilers add, predicts its memory, adds sections to
reports. The optimizer runs on shards under all.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.arrays import Array, Params
from meshpar.contracts.collective import Collective
from meshpar.contracts.declared import DeclaredCollective
from meshpar.contracts.host_transfers import HostTransfer
from meshpar.contracts.written import WrittenCollective
from meshpar.layouts.axes import REPLICA, in_use, ways_of
from meshpar.layouts.layout import Layout
from meshpar.layouts.offload import ACTIVATIONS
from meshpar.layouts.plan import Plan
from meshpar.layouts.token_order import CONTIGUOUS
from meshpar.lowering.automatic_axes import optimizer_bounds
from meshpar.lowering.batches import natural_batch
from meshpar.lowering.chunked_update import ChunkedUpdate, state_transfers
from meshpar.lowering.clipping import clipped
from meshpar.lowering.gathered_weights import gathered_specs
from meshpar.lowering.layer_trace import TracedLayer, held_at_times, trace_layer
from meshpar.lowering.matrix_owners import OwnedUpdate
from meshpar.lowering.memory import Held, Memory, predicted_memory
from meshpar.lowering.optimizer import Optimizer
from meshpar.lowering.small_weights import gather_small
from meshpar.lowering.state import TrainState, fetched_params
from meshpar.lowering.totals import Gradients, Totals
from meshpar.models.model import Model

_CHUNKS = 2
"""Layers on the device at a time of what lives in host memory: used, and on the way."""


@dataclasses.dataclass(frozen=True)
class Lowering:
    """The pure functions of one training step, and facts known before compiling.

    Attributes:
      model: the model.
      optimizer: the optimizer; None where nothing is trained.
      plan: spec of every leaf.
      mesh: the device mesh.
      clip_norm: largest global gradient norm, or None.
      compute_dtype: dtype of the parameters inside the loss, or None for their own.
    """

    name: ClassVar[str]
    types_replicas: ClassVar[bool] = False
    """Whether values that differ between replicas have to be marked so (check_vma)."""
    orders_collectives: ClassVar[bool] = False
    """Whether collectives wait for loops where platforms might mix them with those."""

    model: Model
    optimizer: Optimizer | None
    plan: Plan
    mesh: Mesh
    clip_norm: float | None
    compute_dtype: Any

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.plan.layout

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axis along which steps run apart, manual already, or ()."""
        return in_use((REPLICA,), self.mesh.shape)

    @property
    def token_order(self) -> str:
        """The order in which batches have the tokens of sequences."""
        return CONTIGUOUS

    # The functions of a step.

    def gradients(self, state: TrainState, batch: Any) -> Gradients:
        """Totals of the batch and its gradients, before clipping."""
        raise NotImplementedError

    def evaluate(self, params: Params, batch: Any) -> Totals:
        """Totals of the batch in evaluation mode."""
        batch = natural_batch(batch, self.token_order, self.layout.context)
        return Totals.of(self.model.evaluation_loss(self.weights(params), batch))

    def gradient_sums(self, state: TrainState, batch: Any) -> Gradients:
        """`gradients` before `mean_gradients`, in the dtype of the backward pass."""
        return self.gradients(state, batch)

    def mean_gradients(self, sums: Params, totals: Totals) -> Params:
        """The gradients of `gradients` from the sums of `gradient_sums`, by element."""
        del totals
        return sums

    def train_step(self, state: TrainState, batch: Any) -> tuple[TrainState, Totals]:
        """One step of the optimizer, which runs on shards; adds grad_norm."""
        if self.chunked_update is not None:
            return self._chunked_step(state, batch, self.chunked_update)
        totals, grads, new_state = self.gradients(state, batch)
        grads = self.shard(grads, self.plan.specs)
        grad_norm = optax.tree.norm(self.plan.slopes(grads))
        grads = clipped(grads, grad_norm, self.clip_norm)
        trained = self.plan.trained(state.params)
        loss = totals.reported()["loss"]
        before = grads, state.optimizer_state, trained, loss
        if self.owned_update is not None:
            updates, optimizer_state = self.owned_update.update(*before)
        else:
            axes = self.replica_axes if self.types_replicas else ()
            updates, optimizer_state = self.optimizer.update(*before, axes)
        params = state.params | optax.apply_updates(trained, updates)
        params |= {p: x.astype(params[p].dtype) for p, x in new_state.items()}
        new = state.after_step(params, optimizer_state)
        return new, totals.with_mean("grad_norm", grad_norm)

    def _chunked_step(
        self, state: TrainState, batch: Any, update: ChunkedUpdate
    ) -> tuple[TrainState, Totals]:
        """`train_step` in chunks; gradients stay in the dtype of the backward pass."""
        totals, sums, _ = self.gradient_sums(state, batch)
        sums = self.shard(sums, self.plan.specs)

        def finish(sums: Params, scalars: tuple[Totals, Array]) -> Params:
            totals, grad_norm = scalars
            grads = self.mean_gradients(sums, totals)
            return clipped(grads, grad_norm, self.clip_norm)

        grad_norm = optax.tree.norm(self.plan.slopes(self.mean_gradients(sums, totals)))
        trained, optimizer_state = update.run(
            sums,
            state.optimizer_state,
            self.plan.trained(state.params),
            finish,
            (totals, grad_norm),
            totals.reported()["loss"],
        )
        new = state.after_step(state.params | trained, optimizer_state)
        return new, totals.with_mean("grad_norm", grad_norm)

    @functools.cached_property
    def chunked_update(self) -> ChunkedUpdate | None:
        """The update layer by layer, if state lives in host memory."""
        if not any(self.plan.host_bytes().values()):
            return None
        stack = self.model.layered.split(self.model.params)[1]
        return ChunkedUpdate(self.optimizer, self.plan, frozenset(stack))

    @functools.cached_property
    def owned_update(self) -> OwnedUpdate | None:
        """The update of whole matrices at their owners, if the optimizer needs any."""
        if self.replica_axes or self.optimizer is None:
            return None
        return OwnedUpdate.of(self.optimizer, self.plan, self.mesh)

    def weights(self, params: Params) -> Params:
        """The copies that a model uses outside shard_map."""
        return self.gathered(self.copies(params))

    def copies(self, params: Params) -> Params:
        """The copies of the parameters for the loss: whole over fsdp below zero=3."""
        leaves = self.plan.weights
        params = fetched_params(params, self.plan)
        after = {path: leaf.spec for path, leaf in leaves.items()}
        before = self.plan.parameters
        params = gather_small(params, before, after, self.ways, self.constrain)
        specs = {path: leaf.partition_spec for path, leaf in leaves.items()}
        return self.shard(params, specs)

    def gathered(self, copies: Params) -> Params:
        """Copies; whole over fsdp if small, or if XLA's own gathers would go wrong."""
        before = self.plan.weights
        after = {path: leaf.held for path, leaf in before.items()}
        copies = gather_small(copies, before, after, self.ways, self.constrain)
        specs = gathered_specs(self.plan, self.axes_in_use)
        return self.shard(copies, specs) if specs else copies

    def shard(self, tree: Params, specs: dict[str, PartitionSpec]) -> Params:
        """Constrains {path: array} to specs."""
        return {path: self.constrain(x, specs[path]) for path, x in tree.items()}

    def constrain(self, x: Array, spec: PartitionSpec) -> Array:
        """Constrains an array to a spec."""
        return jax.lax.with_sharding_constraint(x, self.sharding(spec))

    def sharding(self, spec: PartitionSpec) -> NamedSharding | PartitionSpec:
        """A spec on this mesh, or on the mesh in use, which knows its manual axes."""
        return spec if self.replica_axes else NamedSharding(self.mesh, spec)

    # Facts about a step, known before it is compiled.

    @property
    def reason_not_equal(self) -> str:
        """Why the steps differ from one device on purpose; "" if they are equal."""
        return ""

    def bounds(
        self, batch: Any, written: Sequence[DeclaredCollective]
    ) -> Iterator[DeclaredCollective]:
        """The most that compilers add to the collectives that a step writes.

        Args:
          batch: abstract batch of one replica.
          written: those collectives.
        """
        del batch, written
        if axes := self.axes_in_use:
            number, reach = len(self.plan.gradients), self.optimizer.reach
            if self.owned_update is not None and self.owned_update.is_whole:
                reach = dataclasses.replace(reach, moves=False)
            yield from optimizer_bounds(axes, self.ways(axes), number, reach)

    def owners_terms(self) -> Iterator[DeclaredCollective]:
        """The collectives between owners of whole matrices and others, by formula."""
        if self.owned_update is not None:
            yield from self.owned_update.terms()

    def formula_violations(self, written: Sequence[WrittenCollective]) -> list[str]:
        """Differences between a step's collectives and the formula of its layout."""
        del written
        return []

    def host_transfers(self, batch: Any) -> Iterator[HostTransfer]:
        """Transfers between one device and host memory in one training step.

        Args:
          batch: abstract batch of one replica.
        """
        del batch
        return state_transfers(self.plan)

    @property
    def axes_in_use(self) -> tuple[str, ...]:
        """Axes larger than 1 without the axis of replicas, which no step crosses."""
        steps = (axis for axis in self.mesh.axis_names if axis not in self.replica_axes)
        return in_use(steps, self.mesh.shape)

    def ways(self, axes: Iterable[str]) -> int:
        """Devices that axes span together."""
        return ways_of(axes, self.mesh.shape)

    def memory(
        self,
        batch: Any,
        state: dict[str, int] | None = None,
        traced: TracedLayer | None = None,
    ) -> Memory | None:
        """Predicts a step's memory; None for models without layers.

        Args:
          batch: abstract batch of one replica.
          state: bytes of the training state by kind; by default of the plan.
          traced: of one layer, if traced before.
        """
        layered, plan = self.model.layered, self.plan
        if layered is None or not layered.split(self.model.params)[1]:
            return None
        if traced is None:
            traced = trace_layer(layered, plan, self.mesh, batch)
        state, moved = state or self.plan.bytes_per_device(), self.plan.host_bytes()
        state = {kind: size - moved.get(kind, 0) for kind, size in state.items()}
        host = sum(moved.values())
        held = self.held(traced)
        held = held._replace(**held_at_times(traced, layered, plan, self.mesh))
        if ACTIVATIONS in self.layout.offloaded:
            host += held.activations
            held = held._replace(activations=_CHUNKS * traced.saved)
        return predicted_memory(state, traced, held, host)

    def held(self, traced: TracedLayer) -> Held:
        """Bytes held all through a step, from one traced layer."""
        state, depth = self.plan.bytes_per_device(), self.model.layered.depth
        copies = self.compute_dtype is not None or self.layout.zero_level < 3
        groups = self.owned_update.groups if self.owned_update is not None else ()
        return Held(
            weights=state["weights"] if copies else 0,
            gradients=state["gradients"],
            activations=depth * traced.saved,
            chunk=_CHUNKS * sum(self.plan.host_bytes().values()) // depth,
            matrices=max((group.peak_bytes for group in groups), default=0),
        )

    def report(self, batch: Any) -> dict[str, Any]:
        """Sections of a report by name, beyond those that every lowering has.

        Args:
          batch: abstract batch of one replica.
        """
        del batch
        return {}

    @property
    def may_deadlock(self) -> bool:
        """Whether compiled programs have to pass `check_compiled` before they run."""
        return False

    def check_compiled(self, collectives: list[Collective]) -> None:
        """Raises MeshparError if the compiled step must not run."""
