"""Local SGD as pure functions: what replicas do apart, and what they exchange.

The inner step is the lowered step of one replica inside a shard_map that is manual over
`replica`: nothing in it can cross that axis. What crosses it stands in `outer_sync`, in
the same program as the step beside which it travels.
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
from meshpar.layouts.axes import AXES
from meshpar.local_sgd.exchange import AXIS, Exchange, SyncState
from meshpar.local_sgd.mode import LocalSGD
from meshpar.local_sgd.schedule import Transfer
from meshpar.lowering.base import Lowering
from meshpar.lowering.state import Metrics, TrainState
from meshpar.mesh.platform import platform_of
from meshpar.models.model_scope import model_scope

STACKED, WHOLE, ON_DEVICES = (
    PartitionSpec(AXIS),
    PartitionSpec(),
    PartitionSpec(*AXES),
)
"""Specs of what replicas have in front, of numbers, and of what each device keeps."""


class LocalState(NamedTuple):
    """All that training carries from step to step, of all replicas.

    Attributes:
      step: steps done, int32 scalar.
      seed: seed of the run, uint32 scalar.
      params: {path: [R, ...]}, the master weights of every replica.
      optimizer_state: the inner optax state, every leaf [R, ...].
      sync: a `SyncState`, every leaf with the mesh in front: what each device keeps.
      began: int32 scalar, the step at which `sync` was made.
      launched: int32 [F], the step of every fragment's last snapshot; -1 before.
      arrived: int32 [F], the step after which it last reached the replicas.
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
    """The state of one replica, inside shard_map: its noise is its own."""

    def key(self) -> jax.Array:
        """The random key of this step on this replica."""
        return jax.random.fold_in(super().key(), lax.axis_index(AXIS))


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _in_front(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


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
    def outer(self) -> Exchange:
        """What replicas exchange."""
        unit = TILE if platform_of(self.lowering.mesh).tiles_vectors else 1
        return Exchange(
            self.mode, self.lowering.plan, dict(self.lowering.mesh.shape), unit
        )

    # What one replica does.

    def apart(self, fn: Callable) -> Callable:
        """fn(TrainState, batch) of every replica on its own; results [R, ...]."""

        def one(numbers: tuple, stacked: tuple, batch: Any) -> Any:
            state = _ReplicaState(*numbers, *_first(stacked))
            with model_scope(
                self.lowering.plan.layout,
                self.lowering.mesh,
                self.lowering.replica_axes,
            ):
                return _in_front(fn(state, batch))

        def apart(state: LocalState, batch: Any) -> Any:
            stacked = state.params, state.optimizer_state
            return jax.shard_map(
                one,
                in_specs=(WHOLE, STACKED, STACKED),
                out_specs=STACKED,
                axis_names={AXIS},
                check_vma=self.lowering.types_replicas,
            )((state.step, state.seed), stacked, batch)

        return apart

    # What replicas exchange.

    def _on_devices(
        self, fn: Callable, params: Params, sync: SyncState, *rest: Any
    ) -> tuple[Params, SyncState]:
        """fn(params, sync, *rest) -> (params, sync) on every device's own shards."""
        specs = {
            path: PartitionSpec(AXIS, *self.lowering.plan.specs[path])
            for path in params
        }
        lead = len(AXES)

        def one(params: Params, sync: SyncState, *rest: Any) -> tuple:
            sync = jax.tree.map(lambda x: x.reshape(x.shape[lead:]), sync)
            params, sync = fn(_first(params), sync, *rest)
            sync = jax.tree.map(lambda x: x.reshape((1,) * lead + x.shape), sync)
            return _in_front(params), sync

        return jax.shard_map(
            one,
            in_specs=(specs, ON_DEVICES, *(WHOLE for _ in rest)),
            out_specs=(specs, ON_DEVICES),
            check_vma=False,
        )(params, sync, *rest)

    def stepped(self, state: LocalState, batch: Any) -> tuple[LocalState, Metrics]:
        """The inner step of all replicas; metrics [R]."""

        def one(state: TrainState, batch: Any) -> tuple:
            new, metrics = self.lowering.train_step(state, batch)
            metrics = {name: jnp.float32(x) for name, x in metrics.items()}
            return new.params, new.optimizer_state, metrics

        params, optimizer_state, metrics = self.apart(one)(state, batch)
        new = state._replace(
            step=state.step + 1, params=params, optimizer_state=optimizer_state
        )
        return new, metrics

    def stepped_beside(
        self, what: Transfer, state: LocalState, batch: Any, index: tuple
    ) -> tuple[LocalState, Metrics]:
        """The inner step, and what travels beside it."""

        def move(params: Params, sync: SyncState, *index: Any) -> tuple:
            return params, self.outer.transfer(sync, what, index)

        sync = self._on_devices(move, {}, state.sync, *index)[1]
        state, metrics = self.stepped(state, batch)
        return state._replace(sync=sync), metrics

    def launched(self, fragment: int, state: LocalState) -> LocalState:
        """The snapshot of a fragment taken."""

        def launch(params: Params, sync: SyncState) -> tuple:
            return params, self.outer.launch(params, sync, fragment)

        params, sync = self._on_devices(launch, state.params, state.sync)
        launched = state.launched.at[fragment].set(state.step)
        return state._replace(params=params, sync=sync, launched=launched)

    def arrived(self, fragment: int, state: LocalState) -> LocalState:
        """A fragment merged into the replicas."""

        def arrive(params: Params, sync: SyncState) -> tuple:
            return self.outer.arrive(params, sync, fragment)

        params, sync = self._on_devices(arrive, state.params, state.sync)
        arrived = state.arrived.at[fragment].set(state.step)
        return state._replace(params=params, sync=sync, arrived=arrived)

    def synchronized(
        self, fragments: tuple[int, ...], number: int, state: LocalState
    ) -> LocalState:
        """Whole synchronizations of fragments, which nothing hides."""

        def synchronize(params: Params, sync: SyncState) -> tuple:
            for fragment in fragments:
                params, sync = self.outer.at_once(params, sync, fragment, number)
            return params, sync

        params, sync = self._on_devices(synchronize, state.params, state.sync)
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
        """The state in which replicas [R, ...] begin, their average the global one."""

        def start(params: Params) -> SyncState:
            whole = {path: lax.pmean(x[0], AXIS) for path, x in params.items()}
            sync = self.outer.init(whole)
            return jax.tree.map(lambda x: x.reshape((1,) * len(AXES) + x.shape), sync)

        specs = {
            path: PartitionSpec(AXIS, *s)
            for path, s in self.lowering.plan.specs.items()
        }
        sync = jax.shard_map(
            start, in_specs=(specs,), out_specs=ON_DEVICES, check_vma=False
        )(params)
        fragments = self.mode.fragments
        never = jnp.full(fragments, -1, jnp.int32)
        arrived = jnp.broadcast_to(step, fragments)
        return LocalState(
            step, seed, params, optimizer_state, sync, step, never, arrived
        )

    def evaluated(self, state: LocalState, batch: Any) -> Metrics:
        """Loss and aux of the average, and how far replicas are from it (`drift`)."""

        def one(state: TrainState, batch: Any) -> Metrics:
            average = {path: lax.pmean(x, AXIS) for path, x in state.params.items()}
            metrics = self.lowering.evaluate(state._replace(params=average), batch)
            weight = jnp.float32(metrics.get("weight", 1.0))
            total = lax.psum(weight, AXIS)
            means = {k: lax.psum(weight * x, AXIS) / total for k, x in metrics.items()}
            apart = sum(
                jnp.sum(jnp.square(state.params[path] - x))
                for path, x in average.items()
            )
            size = sum(jnp.sum(jnp.square(x)) for x in average.values())
            drift = lax.pmean(jnp.sqrt(apart), AXIS) / jnp.sqrt(size)
            given = {"weight": total} if "weight" in metrics else {}
            return means | given | {"drift": drift}

        return jax.tree.map(lambda x: x[0], self.apart(one)(state, batch))
