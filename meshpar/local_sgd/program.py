"""The program of local SGD: replicas train separately and are averaged.

The host picks the program of every step from the schedule.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.arrays import Params
from meshpar.contracts.collective import Collective
from meshpar.contracts.contract import Contract
from meshpar.errors import MeshparError
from meshpar.layouts.axes import REPLICA
from meshpar.layouts.plan import Plan
from meshpar.local_sgd.clock import Clock
from meshpar.local_sgd.contract import (
    busiest,
    describe_mode,
    mode_violations,
    sent_bytes,
    synchronization_leaves,
)
from meshpar.local_sgd.exchange import Exchange
from meshpar.local_sgd.mode import LocalSGD
from meshpar.local_sgd.schedule import Actions, SyncSchedule, Transfer
from meshpar.local_sgd.step_programs import StepPrograms
from meshpar.local_sgd.steps import PER_DEVICE, REPLICATED, LocalState, LocalSteps
from meshpar.lowering.base import Lowering
from meshpar.lowering.evaluation import Evaluation
from meshpar.lowering.in_trace import is_traced
from meshpar.lowering.replicas import replica_average, with_replicas
from meshpar.lowering.state import Metrics, TrainState, check_alive
from meshpar.lowering.totals import Totals
from meshpar.lowering.train_program import TrainProgram
from meshpar.metrics import WEIGHT


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LocalProgram(TrainProgram):
    """A `TrainProgram` of replicas under local SGD; made by `lower(mode=LocalSGD())`.

    Attributes:
      mode: how replicas are synchronized.
      step_batch: the abstract batch of one replica.
      programs: the compiled programs of the mode.
    """

    mode: LocalSGD
    step_batch: Any = None
    programs: StepPrograms
    _clock: Clock = dataclasses.field(default_factory=Clock, compare=False)

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan of one replica, and the state that synchronizes the replicas."""
        leaves = synchronization_leaves(self.abstract_state.sync)
        return dataclasses.replace(self.lowering.plan, synchronization=leaves)

    @property
    def steps(self) -> LocalSteps:
        """The pure functions of the mode."""
        return self.programs.steps

    @property
    def exchange(self) -> Exchange:
        """The synchronization of the replicas."""
        return self.steps.exchange

    @functools.cached_property
    def schedule(self) -> SyncSchedule:
        """The actions of every step."""
        return SyncSchedule(self.mode)

    def _traced(self, fn: Callable) -> Callable:
        return self.steps.per_replica(fn)

    def lower_step(self, kind: Transfer | None) -> jax.stages.Lowered:
        """The inner step and a transfer of one kind during it, as StableHLO."""
        return self.programs.inspection(kind).lowered

    def step_program(self, transfer: Transfer | None) -> jax.stages.Compiled:
        """The compiled step during which a transfer of the same kind happens."""
        return self.programs.inspection(transfer).compiled

    def step(self, state: LocalState, batch: Any) -> tuple[LocalState, Metrics]:
        """Runs one training step of all replicas; `state` is donated.

        Args:
          state: the state; do not use it afterwards.
          batch: device arrays from `place_batch`, or this process's rows of it; every
            replica trains on its own part of the rows.

        Returns:
          The next state, and metrics: those of `TrainProgram.step` as means over the
          replicas, `replica_bytes` that this device sent to other replicas, and
          `sync_age`, the steps since the fragment that waits longest arrived
          (`sync_age/F` of each, if there are several).

        Raises:
          StalenessError: a fragment would arrive later than the bound allows.
        """
        if is_traced((state, batch)):
            self._check_in_trace()
        clock, batch = self._clock, self._placed(batch)
        check_alive(state)
        clock.read(state)
        actions = self.schedule.actions(clock.step + 1)
        actions = clock.check(actions, self.mode.staleness)
        state, totals = self.programs.run(actions.transfer, state, batch)
        state = self._synchronize(state, actions)
        clock.advance(actions, state)
        return state, {
            **self._reported(totals),
            "replica_bytes": sent_bytes(self.exchange, actions),
            **clock.sync_ages(),
        }

    def _synchronize(self, state: LocalState, actions: Actions) -> LocalState:
        """Runs the actions that follow the inner step."""
        run = self.programs.run_small
        if actions.arrive is not None:
            state = run(self.steps.arrived, state, actions.arrive)
        if actions.launch and actions.at_once:
            number = actions.round % self.exchange.num_rounds
            return run(self.steps.synchronized, state, actions.launch, number)
        for fragment in actions.launch:
            state = run(self.steps.launched, state, fragment)
        return state

    @functools.cached_property
    def _reported(self) -> Callable[[Totals], Metrics]:
        """Metrics of the whole batch from the totals [R] of all replicas."""
        return jax.jit(
            lambda totals: totals.over_rows().reported(), out_shardings=self._whole
        )

    @functools.cached_property
    def init_function(self) -> Callable[[Any, Params], LocalState]:
        count = self.layout.replica

        def init(seed: jax.Array, given: Params) -> LocalState:
            params = self._init_params_from(seed, given)
            stacked = jax.tree.map(
                lambda x: jnp.broadcast_to(x, (count, *x.shape)),
                (params, self.lowering.optimizer.init(self.plan.trained(params))),
            )
            return self.steps.started(jnp.zeros((), jnp.int32), seed, *stacked)

        return jax.jit(init, out_shardings=self.state_shardings)

    def init(self, seed: int = 0, params: Any = None) -> LocalState:
        """Makes a fresh state: all replicas start with equal weights.

        Takes the arguments of `TrainProgram.init`.
        """
        with jax.set_mesh(self.mesh):
            return super().init(seed, params)

    def evaluated_params(self, state: LocalState) -> Params:
        """The average of the replicas, {path: array}."""
        check_alive(state.params)
        with jax.set_mesh(self.mesh):
            return self._average(state.params)

    def ema_weights(self, state: LocalState) -> Params:
        """The average over the replicas of what `meshpar.with_ema` keeps."""
        with jax.set_mesh(self.mesh):
            return self._average(super().ema_weights(state))

    @functools.cached_property
    def _average(self) -> Callable[[Params], Params]:
        shardings = {
            path: NamedSharding(self.mesh, spec)
            for path, spec in self.lowering.plan.specs.items()
        }
        return jax.jit(
            lambda params: {path: replica_average(x) for path, x in params.items()},
            out_shardings=shardings,
        )

    def evaluate_params(
        self, params: Params, batch: Any, rows: int | None = None
    ) -> Metrics:
        """Refused: replicas that train apart evaluate their average, by a state.

        Raises:
          MeshparError: always.
        """
        raise MeshparError(
            f"{self.mode_text}: evaluate_params takes weights of one model; use "
            "evaluate(state, batch), or a program without mode= for other weights"
        )

    def evaluate(
        self, state: LocalState, batch: Any, rows: int | None = None
    ) -> Metrics:
        """Metrics of the average of the replicas on a batch, and `drift`."""
        check_alive(state)
        with self._on_mesh((state, batch)):
            return self._evaluated(state, batch, rows)

    def _evaluation(self, rows: int) -> Callable[[LocalState, Any], Metrics]:
        evaluation = Evaluation.of(self.lowering, rows, self._num_rows)

        def evaluate(state: LocalState, batch: Any) -> Metrics:
            found = self.steps.evaluated(state, batch, evaluation)
            return {WEIGHT: jnp.float32(rows)} | found

        return jax.jit(evaluate, out_shardings=self._whole)

    @property
    def portable_state(self) -> TrainState:
        """The state that other layouts can restore, as ShapeDtypeStructs."""
        return TrainState(*self.abstract_state[:4])

    @property
    def abstract_extra(self) -> tuple:
        """The result of `extra_state`, as ShapeDtypeStructs with shardings."""
        return tuple(self.abstract_state[4:])

    @property
    def extra_identity(self) -> str:
        """The mode to which `extra_state` belongs."""
        return self.mode.identity()

    def in_model_order(self, state: LocalState) -> TrainState:
        """Weights and optimizer state of all replicas, [R, ...]."""
        return TrainState(*state[:4])

    def extra_state(self, state: LocalState) -> tuple:
        """Traveling fragments, the global weights and their optimizer state."""
        return tuple(state[4:])

    def as_stored(self, state: TrainState, extra: tuple | None = None) -> LocalState:
        """Returns the whole state; without `extra` the average becomes the anchor."""
        if extra is not None:
            return LocalState(*state, *extra)
        with jax.set_mesh(self.mesh):
            return jax.jit(self.steps.started, out_shardings=self.state_shardings)(
                *state
            )

    def violations(self) -> list[str]:
        """Violations of the contracts of all programs that the mode runs."""
        lines = mode_violations(self.programs, self.contract)
        written = self.inspection.written
        return [*lines, *self.lowering.formula_violations(written)]

    @property
    def busiest(self) -> tuple[Contract, list[Collective]]:
        """Declared and found, of the step that moves most."""
        return busiest(self.programs, self.contract)

    @property
    def mode_text(self) -> str:
        """One line about the mode: its synchronization, and the bytes that it sends."""
        return describe_mode(self.exchange)

    @property
    def reason_not_equal(self) -> str:
        """Replicas train separately on purpose."""
        return (
            "replicas that train apart do not equal one device: verify the layout with "
            "data in place of replica"
        )

    def __str__(self) -> str:
        return self.mode_text


def make_program(
    lowering: Lowering,
    mode: LocalSGD,
    abstract_state: TrainState,
    abstract_batch: Any,
    step_batch: Any,
    why_auto: str = "",
) -> LocalProgram:
    """Makes the program of replicas from the lowering of one of them.

    Args:
      lowering: the step of one replica, on the mesh of all.
      mode: how replicas are synchronized.
      abstract_state: state of one replica.
      abstract_batch: the global batch.
      step_batch: the part of one replica.
      why_auto: the schedule that schedule=auto took, and why.

    Raises:
      LayoutError: weights that are not floating point.
      MeshparError: a gossip graph that does not fit the number of replicas.
      StalenessError: an elastic pull that is too strong for so many replicas.
    """
    mesh = lowering.mesh
    stacked = with_replicas(abstract_state, 1, mesh.shape[REPLICA], REPLICA)
    steps = LocalSteps(lowering, mode)
    with jax.set_mesh(mesh):
        state = jax.eval_shape(steps.started, *stacked)

    def placed(leaves: Any, spec: PartitionSpec) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda leaf: leaf.update(sharding=sharding), leaves)

    counts = placed((state.began, state.launched, state.arrived), REPLICATED)
    state = LocalState(*stacked, placed(state.sync, PER_DEVICE), *counts)
    programs = StepPrograms(steps, state, abstract_batch)
    return LocalProgram(
        lowering=lowering,
        abstract_state=state,
        abstract_batch=abstract_batch,
        inspection=programs.inspection(None),
        programs=programs,
        why_auto=why_auto,
        mode=mode,
        step_batch=step_batch,
    )
