"""Local SGD as pure functions: the inner steps of all replicas, and their exchange.

The inner step is the lowered step of one replica inside a shard_map that is manual over
`replica`, so no collective in it can cross that axis. The collectives that cross it are
in `exchange`; they are traced into the same program as the step during which they run.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.arrays import Params
from meshpar.collectives.compression import TILE
from meshpar.layouts.axes import AXES, REPLICA
from meshpar.local_sgd.exchange import Exchange, make_exchange
from meshpar.local_sgd.mode import LocalSGD
from meshpar.local_sgd.schedule import Transfer
from meshpar.local_sgd.sync_state import SyncState
from meshpar.lowering.base import Lowering
from meshpar.lowering.evaluation import Evaluation
from meshpar.lowering.state import Metrics, TrainState
from meshpar.lowering.totals import Totals
from meshpar.mesh.platform import platform_of
from meshpar.models.model_scope import model_scope
from meshpar.replicated import map_rows

STACKED = PartitionSpec(REPLICA)
"""Spec of arrays [R, ...], one row per replica."""

REPLICATED = PartitionSpec()
"""Spec of numbers that all devices hold."""

PER_DEVICE = PartitionSpec(*AXES)
"""Spec of arrays [mesh..., ...], one part per device."""


class LocalState(NamedTuple):
    """The training state of all replicas.

    Attributes:
      step: steps done, int32 scalar.
      seed: seed of the run, uint32 scalar.
      params: {path: [R, ...]}, the master weights of every replica.
      optimizer_state: the inner optax state, every leaf [R, ...].
      sync: a `SyncState`, every leaf with the mesh axes as leading dims.
      began: int32 scalar, the step at which `sync` was made.
      launched: int32 [F], the step of every fragment's last snapshot; -1 before.
      arrived: int32 [F], the step after which every fragment was merged last.
    """

    step: jax.Array
    seed: jax.Array
    params: Params
    optimizer_state: Any
    sync: SyncState
    began: jax.Array
    launched: jax.Array
    arrived: jax.Array


class _ReplicaState(TrainState):
    """The state of one replica inside shard_map, with random keys of its own."""

    def key(self) -> jax.Array:
        """The random key of this step on this replica."""
        return jax.random.fold_in(super().key(), lax.axis_index(REPLICA))


def _first(tree: Any) -> Any:
    """Leaves [1, ...] to [...]."""
    return jax.tree.map(lambda x: x[0], tree)


def _stacked(tree: Any) -> Any:
    """Leaves [...] to [1, ...]."""
    return jax.tree.map(lambda x: x[None], tree)


def _replica_mean(x: jax.Array) -> jax.Array:
    """`replica_average` inside shard_map; integers are equal on all replicas."""
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return lax.pmean(x, REPLICA) if floating else lax.pmax(x, REPLICA)


def _without_mesh_dims(sync: SyncState) -> SyncState:
    return jax.tree.map(lambda x: x.reshape(x.shape[len(AXES) :]), sync)


def _with_mesh_dims(sync: SyncState) -> SyncState:
    return jax.tree.map(lambda x: x.reshape((1,) * len(AXES) + x.shape), sync)


@dataclasses.dataclass(frozen=True)
class LocalSteps:
    """The pure functions of one mode over one lowering.

    Attributes:
      lowering: the step of one replica, on the mesh of all.
      mode: how replicas are synchronized.
    """

    lowering: Lowering
    mode: LocalSGD

    @functools.cached_property
    def exchange(self) -> Exchange:
        """The synchronization of the replicas."""
        mesh = self.lowering.mesh
        tile = TILE if platform_of(mesh).tiles_vectors else 1
        return make_exchange(self.mode, self.lowering.plan, dict(mesh.shape), tile)

    def per_replica(self, fn: Callable) -> Callable:
        """Runs fn(TrainState, batch) on every replica separately; results [R, ...]."""

        def on_one(numbers: tuple, stacked: tuple, batch: Any) -> Any:
            state = _ReplicaState(*numbers, *_first(stacked))
            layout = self.lowering.plan.layout
            axes = self.lowering.replica_axes
            with model_scope(layout, self.lowering.mesh, axes):
                return _stacked(fn(state, batch))

        def on_all(state: LocalState, batch: Any) -> Any:
            stacked = state.params, state.optimizer_state
            rows = map_rows(lambda _: STACKED, batch, others=lambda _: REPLICATED)
            return jax.shard_map(
                on_one,
                in_specs=(REPLICATED, STACKED, rows),
                out_specs=STACKED,
                axis_names={REPLICA},
                check_vma=self.lowering.types_replicas,
            )((state.step, state.seed), stacked, batch)

        return on_all

    @property
    def _stacked_specs(self) -> dict[str, PartitionSpec]:
        """{path: spec} of the weights of all replicas, [R, ...]."""
        specs = self.lowering.plan.specs
        return {path: PartitionSpec(REPLICA, *spec) for path, spec in specs.items()}

    def _per_device(
        self, fn: Callable, params: Params, sync: SyncState, *rest: Any
    ) -> tuple[Params, SyncState]:
        """Runs fn(params, sync, *rest) -> (params, sync) on every device's shards."""
        stacked = self._stacked_specs
        specs = {path: stacked[path] for path in params}

        def on_one(params: Params, sync: SyncState, *rest: Any) -> tuple:
            sync = _without_mesh_dims(sync)
            params, sync = fn(_first(params), sync, *rest)
            sync = _with_mesh_dims(sync)
            return _stacked(params), sync

        return jax.shard_map(
            on_one,
            in_specs=(specs, PER_DEVICE, *(REPLICATED for _ in rest)),
            out_specs=(specs, PER_DEVICE),
            check_vma=False,
        )(params, sync, *rest)

    def stepped(self, state: LocalState, batch: Any) -> tuple[LocalState, Totals]:
        """The inner step of all replicas; totals [R]."""

        def step(state: TrainState, batch: Any) -> tuple:
            new, totals = self.lowering.train_step(state, batch)
            return new.params, new.optimizer_state, self._totals_of_replica(totals)

        params, optimizer_state, totals = self.per_replica(step)(state, batch)
        new = state._replace(
            step=state.step + 1, params=params, optimizer_state=optimizer_state
        )
        return new, totals

    def _totals_of_replica(self, totals: Totals) -> Totals:
        """A replica's totals, to which those of the other replicas can be added."""
        replicas = self.lowering.mesh.shape[REPLICA]
        return totals.last_where(lax.axis_index(REPLICA) == replicas - 1)

    def stepped_beside(
        self, kind: Transfer, state: LocalState, batch: Any, index: tuple
    ) -> tuple[LocalState, Totals]:
        """The inner step and a transfer during it.

        Args:
          kind: from `Transfer.kind`.
          state: the state of all replicas.
          batch: the global batch.
          index: (fragment, slice to scatter, slice to gather), int32 scalars.
        """

        def transfer(params: Params, sync: SyncState, *index: Any) -> tuple:
            return params, self.exchange.transfer(sync, kind, index)

        sync = self._per_device(transfer, {}, state.sync, *index)[1]
        state, totals = self.stepped(state, batch)
        return state._replace(sync=sync), totals

    def launched(self, fragment: int, state: LocalState) -> LocalState:
        """The state after the snapshot of a fragment."""

        def launch(params: Params, sync: SyncState) -> tuple:
            return params, self.exchange.launch(params, sync, fragment)

        params, sync = self._per_device(launch, state.params, state.sync)
        launched = state.launched.at[fragment].set(state.step)
        return state._replace(params=params, sync=sync, launched=launched)

    def arrived(self, fragment: int, state: LocalState) -> LocalState:
        """The state after a fragment is merged into the replicas."""

        def arrive(params: Params, sync: SyncState) -> tuple:
            return self.exchange.arrive(params, sync, fragment)

        params, sync = self._per_device(arrive, state.params, state.sync)
        arrived = state.arrived.at[fragment].set(state.step)
        return state._replace(params=params, sync=sync, arrived=arrived)

    def synchronized(
        self, fragments: tuple[int, ...], number: int, state: LocalState
    ) -> LocalState:
        """The state after fragments are synchronized at once, hidden by no compute.

        Args:
          fragments: their numbers.
          number: round of the gossip graph.
          state: the state of all replicas.
        """

        def synchronize(params: Params, sync: SyncState) -> tuple:
            for fragment in fragments:
                params, sync = self.exchange.at_once(params, sync, fragment, number)
            return params, sync

        params, sync = self._per_device(synchronize, state.params, state.sync)
        return state._replace(
            params=params,
            sync=sync,
            launched=state.launched.at[jnp.array(fragments)].set(state.step),
            arrived=state.arrived.at[jnp.array(fragments)].set(state.step),
        )

    def started(
        self,
        step: jax.Array,
        seed: jax.Array,
        params: Params,
        optimizer_state: Any,
    ) -> LocalState:
        """The state in which replicas [R, ...] begin; their average is the anchor."""

        def start(params: Params) -> SyncState:
            trained = self.lowering.plan.trained(params)
            average = {path: lax.pmean(x[0], REPLICA) for path, x in trained.items()}
            return _with_mesh_dims(self.exchange.init(average))

        sync = jax.shard_map(
            start,
            in_specs=(self._stacked_specs,),
            out_specs=PER_DEVICE,
            check_vma=False,
        )(params)
        fragments = self.mode.fragments
        never = jnp.full(fragments, -1, jnp.int32)
        arrived = jnp.broadcast_to(step, fragments)
        return LocalState(
            step, seed, params, optimizer_state, sync, step, never, arrived
        )

    def evaluated(
        self, state: LocalState, batch: Any, evaluation: Evaluation
    ) -> Metrics:
        """Loss and aux of the average, and `drift`, the replicas' distance to it.

        Drift is the mean L2 distance, relative to the norm of the average.

        Args:
          state: the state of all replicas.
          batch: the global batch.
          evaluation: of its number of rows.
        """

        def evaluate(state: TrainState, batch: Any) -> Metrics:
            average = {path: _replica_mean(x) for path, x in state.params.items()}
            totals = self._totals_of_replica(evaluation.totals(average, batch))
            metrics = totals.over((REPLICA,)).reported()
            trained = self.lowering.plan.trained(average)
            distance = sum(
                jnp.sum(jnp.square(state.params[path] - x))
                for path, x in trained.items()
            )
            norm = sum(jnp.sum(jnp.square(x)) for x in trained.values())
            drift = lax.pmean(jnp.sqrt(distance), REPLICA) / jnp.sqrt(norm)
            return metrics | {"drift": drift}

        batch = evaluation.filled(batch)
        return _first(self.per_replica(evaluate)(state, batch))
