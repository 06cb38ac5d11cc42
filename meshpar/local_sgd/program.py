"""Local SGD as compiled programs, and the host that runs them in turn.

Which program runs is decided on the host by the schedule, so no program has a
conditional for it, and none is compiled again as fragments take turns.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.arrays import Params
from meshpar.layouts.plan import Plan
from meshpar.local_sgd.clock import Clock
from meshpar.local_sgd.contract import (
    describe_mode,
    kept_leaves,
    mode_violations,
    transfers,
)
from meshpar.local_sgd.exchange import AXIS, Exchange
from meshpar.local_sgd.mode import LocalSGD
from meshpar.local_sgd.schedule import Schedule, Transfer, check_arrival
from meshpar.local_sgd.steps import ON_DEVICES, STACKED, WHOLE, LocalState, LocalSteps
from meshpar.lowering.base import Lowering
from meshpar.lowering.program import TrainProgram
from meshpar.lowering.replicas import with_replicas
from meshpar.lowering.state import Metrics, TrainState
from meshpar.mesh.torus import compiler_options


@dataclasses.dataclass(frozen=True)
class LocalProgram(TrainProgram):
    """A `TrainProgram` of replicas that train apart; made by `lower(mode=LocalSGD())`.

    Attributes:
      mode: how they are synchronized.
      step_batch: the abstract batch of one replica.
    """

    mode: LocalSGD = LocalSGD()
    step_batch: Any = None
    _clock: Clock = dataclasses.field(default_factory=Clock, compare=False)

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan of one replica, and what each device keeps to synchronize it."""
        kept = kept_leaves(self.abstract_state.sync)
        return dataclasses.replace(self.lowering.plan, synchronization=kept)

    @functools.cached_property
    def steps(self) -> LocalSteps:
        """What replicas do, as pure functions."""
        return LocalSteps(self.lowering, self.mode)

    @property
    def outer(self) -> Exchange:
        """What they exchange."""
        return self.steps.outer

    @functools.cached_property
    def schedule(self) -> Schedule:
        """What happens in every step."""
        return Schedule(self.mode)

    def _traced(self, fn: Callable) -> Callable:
        return self.steps.apart(fn)

    # Programs.

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        """The inner step as StableHLO."""
        return self._lower_step(None)

    @functools.cached_property
    def _compiled(self) -> dict[Transfer | None, jax.stages.Compiled]:
        return {}

    def _lower_step(self, what: Transfer | None) -> jax.stages.Lowered:
        stepped, index = self.steps.stepped, ()
        if what is not None:
            stepped = functools.partial(self.steps.stepped_beside, what)
            index = ((jax.ShapeDtypeStruct((), jnp.int32),) * 3,)
        replicated = NamedSharding(self.mesh, STACKED)
        with jax.set_mesh(self.mesh):
            return jax.jit(
                stepped,
                donate_argnums=0,
                out_shardings=(self.state_shardings, replicated),
                compiler_options=compiler_options(self.mesh),
            ).lower(self.abstract_state, self.abstract_batch, *index)

    def step_program(self, what: Transfer | None) -> jax.stages.Compiled:
        """The compiled step beside which `what` travels; numbers do not count."""
        kind = self.kind(what)
        if kind not in self._compiled:
            lowered = self.lowered if kind is None else self._lower_step(kind)
            made = lowered.compile()
            self.lowering.check_compiled(self.collectives_of(made))
            self._compiled[kind] = made
        return self._compiled[kind]

    def kind(self, what: Transfer | None) -> Transfer | None:
        """One of all transfers that share a program: which parts there are."""
        if what is None:
            return None
        rounds = max(1, len(self.outer.rounds))
        together = what.scatter is not None and what.scatter == what.gather
        return Transfer(
            fragment=0,
            scatter=None if what.scatter is None else 0 if together else 1,
            gather=None if what.gather is None else 0,
            round=what.round % rounds,
        )

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled inner step, beside which nothing travels."""
        return self.step_program(None)

    @functools.cached_property
    def _small(self) -> dict[tuple, Callable]:
        return {}

    def _run_small(self, fn: Callable, state: LocalState, *static: Any) -> LocalState:
        """Runs a program that computes next to nothing, compiled once per fragment."""
        key = fn.__name__, *static
        if key not in self._small:
            self._small[key] = jax.jit(
                functools.partial(fn, *static),
                donate_argnums=0,
                out_shardings=self.state_shardings,
            )
        with jax.set_mesh(self.mesh):
            return self._small[key](state)

    @functools.cached_property
    def _means_of(self) -> Callable[[Metrics], Metrics]:
        """Metrics [R] to their means, weighted by "weight" if it is among them."""

        def means(metrics: Metrics) -> Metrics:
            weight = metrics.get("weight", jnp.ones(self.layout.replica))
            return {
                name: x.sum() if name == "weight" else (x * weight).sum() / weight.sum()
                for name, x in metrics.items()
            }

        return jax.jit(means, out_shardings=self._whole)

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
        clock, batch = self._clock, self._placed(batch)
        clock.read(state)
        step = clock.step + 1
        what, arrive, launch, at_once, number = self.schedule.actions(step)
        if what is not None and what.taken <= clock.began > 0:
            what = arrive = None  # Taken before the average that everything began with.
        if arrive is not None:
            check_arrival(self.mode, arrive, clock.launched[arrive], step)
        sent, index = 0.0, ()
        if what is not None:
            index = tuple(np.int32(x or 0) for x in what[:3])
            sent += sum(term.wire_bytes for term in self.outer.terms(what))
        if not self._compiled:  # All at once: no step stops for the compiler later.
            for one in (None, *transfers(self)):
                self.step_program(one)
        program = self.step_program(what)
        state, metrics = program(state, batch, *((index,) if index else ()))
        if arrive is not None:
            state = self._run_small(self.steps.arrived, state, arrive)
            clock.arrived[arrive] = step
        for fragment in launch:
            clock.launched[fragment] = step
            if not at_once:
                state = self._run_small(self.steps.launched, state, fragment)
        if launch and at_once:
            number %= max(1, len(self.outer.rounds))
            state = self._run_small(self.steps.synchronized, state, launch, number)
            chunks = len(launch) * self.mode.num_chunks
            terms = self.outer.terms(self.whole_transfer(number), chunks)
            sent += sum(term.wire_bytes for term in terms)
            for fragment in launch:
                clock.arrived[fragment] = step
        clock.state_step, clock.step = state.step, step
        ages = [float(step - arrived) for arrived in clock.arrived]
        each = {f"sync_age/{f}": age for f, age in enumerate(ages)}
        return state, self._means_of(metrics) | {
            "replica_bytes": sent,
            "sync_age": max(ages),
            **(each if len(ages) > 1 else {}),
        }

    def whole_transfer(self, number: int) -> Transfer:
        """All that a synchronization at once moves of a chunk, in a round."""
        return Transfer(0, 0, None if self.outer.rounds else 0, number)

    # Start, evaluation, average.

    @functools.cached_property
    def _init(self) -> Callable[[Any], LocalState]:
        count = self.layout.replica

        def init(seed: jax.Array) -> LocalState:
            params = self.model.init(jax.random.key(seed))
            stacked = jax.tree.map(
                lambda x: jnp.broadcast_to(x, (count, *x.shape)),
                (params, self.lowering.optimizer.init(params)),
            )
            return self.steps.started(jnp.zeros((), jnp.int32), seed, *stacked)

        return jax.jit(init, out_shardings=self.state_shardings)

    def init(self, seed: int = 0) -> LocalState:
        """Makes a fresh state: all replicas as one device would start."""
        with jax.set_mesh(self.mesh):
            return self._init(np.uint32(seed))

    def weights(self, state: LocalState) -> Params:
        """The average of the replicas, {path: array}."""
        with jax.set_mesh(self.mesh):
            return self._average(state.params)

    @functools.cached_property
    def _average(self) -> Callable[[Params], Params]:
        shardings = {
            path: NamedSharding(self.mesh, spec)
            for path, spec in self.lowering.plan.specs.items()
        }
        return jax.jit(
            lambda params: {path: x.mean(axis=0) for path, x in params.items()},
            out_shardings=shardings,
        )

    @functools.cached_property
    def _evaluate(self) -> Callable:
        jitted = jax.jit(self.steps.evaluated, out_shardings=self._whole)

        def call(state: LocalState, batch: Any) -> Metrics:
            with jax.set_mesh(self.mesh):
                return jitted(state, batch)

        return call

    # Checkpoints: what any layout can use, and what only this one can.

    @property
    def portable_state(self) -> TrainState:
        """What `in_model_order` returns, as ShapeDtypeStructs with shardings."""
        return TrainState(*self.abstract_state[:4])

    @property
    def abstract_extra(self) -> tuple:
        """What `extra_state` returns, likewise."""
        return tuple(self.abstract_state[4:])

    @property
    def extra_identity(self) -> str:
        """The mode, as what is on its way depends on it."""
        return self.mode.identity()

    def in_model_order(self, state: LocalState) -> TrainState:
        """Weights and optimizer state of all replicas, [R, ...]."""
        return TrainState(*state[:4])

    def extra_state(self, state: LocalState) -> tuple:
        """What is on its way, the global weights and their optimizer."""
        return tuple(state[4:])

    def as_stored(self, state: TrainState, extra: tuple | None = None) -> LocalState:
        """The whole state; without `extra` replicas begin anew with their average."""
        if extra is not None:
            return LocalState(*state, *extra)
        with jax.set_mesh(self.mesh):
            return jax.jit(self.steps.started, out_shardings=self.state_shardings)(
                *state
            )

    # Contracts.

    def violations(self) -> list[str]:
        """What any of the compiled steps does against its contract."""
        return mode_violations(self)

    def __str__(self) -> str:
        return describe_mode(self)


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
      mode: how they are synchronized.
      abstract_state: state of one replica.
      abstract_batch: the global batch.
      step_batch: the part of one replica.
      why_auto: what schedule=auto took, and why.
    """
    mesh = lowering.mesh

    def placed(spec: PartitionSpec) -> Callable:
        return lambda leaf: leaf.update(sharding=NamedSharding(mesh, spec))

    stacked = with_replicas(abstract_state, 1, mesh.shape[AXIS], AXIS)
    program = LocalProgram(
        lowering=lowering,
        abstract_state=None,
        abstract_batch=abstract_batch,
        why_auto=why_auto,
        mode=mode,
        step_batch=step_batch,
    )
    with jax.set_mesh(mesh):
        state = jax.eval_shape(program.steps.started, *stacked)
    counts = state.began, state.launched, state.arrived
    counts = jax.tree.map(placed(WHOLE), counts)
    sync = jax.tree.map(placed(ON_DEVICES), state.sync)
    return dataclasses.replace(
        program, abstract_state=LocalState(*stacked, sync, *counts)
    )
