"""Trains a pipeline of replicated stages as PipeDream does, a device for each worker.

One process runs the workers' operations in the order of their data. What a worker
computes is dispatched to its device, so that devices work at the same time. Every
forward and backward pass uses the version of its stage's weights that the policy says,
and a version is dropped when no minibatch needs it any more.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from meshpar.errors import MeshparError
from meshpar.methods.pipedream.order import FORWARD, Op, Worker, orders
from meshpar.methods.pipedream.versions import NEWEST, STASHED, Versions

StageFn = Callable[[Any, Any], Any]
"""(weights of the stage, its input) -> its output."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """The end of a run.

    Attributes:
      params: weights of each stage, with all updates.
      losses: of each minibatch, at the weights that it met.
      used: {(kind of pass, stage, minibatch): version of the weights}.
      held: most versions of its weights that each stage held at once.
    """

    params: list[Any]
    losses: list[Any]
    used: dict[tuple[str, int, int], int]
    held: list[int]


class PipeDream:
    """A pipeline of stages that never waits for a flush."""

    def __init__(
        self,
        stages: Sequence[StageFn],
        loss: Callable[[Any, Any], Any],
        optimizer: optax.GradientTransformation,
        *,
        weights: str = STASHED,
        replicas: Sequence[int] = (),
        accumulate: int = 0,
        devices: Sequence[jax.Device] | None = None,
    ):
        """Prepares the stages.

        Args:
          stages: functions, first to last.
          loss: (output of the last stage, minibatch) -> scalar, a mean over rows.
          optimizer: updates each stage by itself.
          weights: which versions are used, one of `versions.POLICIES`.
          replicas: workers of each stage; one by default.
          accumulate: minibatches of an update, with weights="double_buffered".
          devices: one for each worker, stage by stage; those of this machine by
            default.

        Raises:
          MeshparError: numbers that do not go together, or too few devices.
        """
        self.replicas = tuple(replicas) or (1,) * len(stages)
        if len(self.replicas) != len(stages):
            raise MeshparError(
                f"replicas={self.replicas} for {len(stages)} stages: give one number "
                "for each"
            )
        self.versions = Versions(self.replicas, weights, accumulate)
        devices = list(jax.devices() if devices is None else devices)
        if len(devices) < sum(self.replicas):
            raise MeshparError(
                f"replicas={self.replicas} need {sum(self.replicas)} devices, not "
                f"{len(devices)}: use fewer workers"
            )
        self.device = {
            Worker(stage, replica): devices[sum(self.replicas[:stage]) + replica]
            for stage, count in enumerate(self.replicas)
            for replica in range(count)
        }
        self.stages, self.num_stages = tuple(stages), len(stages)
        self.loss, self.optimizer = loss, optimizer

    def train(
        self,
        params: Sequence[Any],
        minibatches: Sequence[Any],
        inputs: Callable[[Any], Any] = lambda minibatch: minibatch["x"],
    ) -> Trained:
        """Trains on minibatches, and drains the pipeline at the end.

        Args:
          params: weights of each stage; they are copied.
          minibatches: as many as divide over the workers of each stage.
          inputs: (minibatch) -> input of the first stage.
        """
        run = _Run(self, params, minibatches, inputs)
        run.to_the_end()
        return Trained(
            [stage.at[stage.newest][0] for stage in run.stages],
            run.losses,
            run.used,
            [stage.most for stage in run.stages],
        )


# Compiled once for all pipelines of these functions.
_static = functools.partial(jax.jit, static_argnums=0)


@_static
def _output(stage: StageFn, params: Any, x: Any) -> Any:
    return stage(params, x)


@_static
def _loss(loss: Callable[[Any, Any], Any], y: Any, batch: Any) -> tuple[Any, Any]:
    """The loss, and its gradient by the output of the last stage."""
    return jax.value_and_grad(loss)(y, batch)


@_static
def _gradients(stage: StageFn, params: Any, x: Any, gradient: Any) -> tuple[Any, Any]:
    """Gradients of weights and input; the stage runs again."""
    return jax.vjp(stage, params, x)[1](gradient)


@_static
def _updated(
    optimizer: optax.GradientTransformation, gradients: Any, state: Any, params: Any
) -> tuple[Any, Any]:
    """An update with the mean of some gradients."""
    mean = jax.tree.map(lambda *xs: sum(xs) / len(xs), *gradients)
    changes, state = optimizer.update(mean, state, params)
    return optax.apply_updates(params, changes), state


@dataclasses.dataclass
class _Stage:
    """The versions of one stage's weights, and gradients that wait for others.

    Attributes:
      at: {version: its weights, on the device of each replica}.
      state: of the optimizer.
      needed: {minibatch in flight: version that its backward pass will use}.
      gradients: {update: gradients of its minibatches, in their order}.
      newest: version.
      most: versions that were held at once.
    """

    at: dict[int, list[Any]]
    state: Any
    needed: dict[int, int] = dataclasses.field(default_factory=dict)
    gradients: dict[int, dict[int, Any]] = dataclasses.field(default_factory=dict)
    newest: int = 0
    most: int = 1


class _Run:
    """The state of a run."""

    def __init__(self, pipeline: PipeDream, params, minibatches, inputs):
        self.pipeline, self.minibatches, self.inputs = pipeline, minibatches, inputs
        self.orders = {
            worker: list(reversed(ops))
            for worker, ops in orders(pipeline.replicas, len(minibatches)).items()
        }
        self.stages = []
        for stage, weights in enumerate(params):
            copies = self._copies(stage, weights)
            self.stages.append(_Stage({0: copies}, pipeline.optimizer.init(copies[0])))
        self.waiting = [set(range(len(minibatches))) for _ in params]
        self.x: dict[tuple[int, int], Any] = {}
        self.gradient: dict[tuple[int, int], Any] = {}
        self.losses: list[Any] = [None] * len(minibatches)
        self.used: dict[tuple[str, int, int], int] = {}

    def _copies(self, stage: int, weights: Any) -> list[Any]:
        workers = [w for w in self.orders if w.stage == stage]
        return [jax.device_put(weights, self.pipeline.device[w]) for w in workers]

    def to_the_end(self) -> None:
        """Runs every operation as soon as its data are there."""
        while any(self.orders.values()):
            ready = [
                worker
                for worker, ops in self.orders.items()
                if ops and self._is_ready(worker, ops[-1])
            ]
            assert ready, "the order of the workers has a circle"
            for worker in ready:
                op = self.orders[worker].pop()
                run = self._forward if op.kind == FORWARD else self._backward
                run(worker, op.minibatch)
                stage = self.stages[worker.stage]
                stage.most = max(stage.most, len(stage.at))

    def _is_ready(self, worker: Worker, op: Op) -> bool:
        versions, stage = self.pipeline.versions, self.stages[worker.stage]
        at = worker.stage, op.minibatch
        if op.kind == FORWARD:
            there = worker.stage == 0 or at in self.x
            return there and stage.newest >= versions.forward(*at)
        last = worker.stage == self.pipeline.num_stages - 1
        # Stages behind pass on the gradient before they update.
        there = at in self.gradient or (last and at in self.x)
        return there and stage.newest >= versions.backward(*at)

    def _weights(self, kind: str, worker: Worker, minibatch: int) -> Any:
        versions = self.pipeline.versions
        choose = versions.forward if kind == FORWARD else versions.backward
        version = choose(worker.stage, minibatch)
        self.used[kind, worker.stage, minibatch] = version
        return self.stages[worker.stage].at[version][worker.replica]

    def _forward(self, worker: Worker, minibatch: int) -> None:
        pipeline, stage = self.pipeline, worker.stage
        if stage == 0:
            x = self.inputs(self.minibatches[minibatch])
            self.x[0, minibatch] = jax.device_put(x, pipeline.device[worker])
        weights = self._weights("F", worker, minibatch)
        self.waiting[stage].discard(minibatch)
        if pipeline.versions.policy != NEWEST:
            version = pipeline.versions.backward(stage, minibatch)
            self.stages[stage].needed[minibatch] = version
        if stage == pipeline.num_stages - 1:
            y = _output(pipeline.stages[stage], weights, self.x[stage, minibatch])
            batch = jax.device_put(self.minibatches[minibatch], pipeline.device[worker])
            self.losses[minibatch], gradient = _loss(pipeline.loss, y, batch)
            self.gradient[stage, minibatch] = gradient
            return
        y = _output(pipeline.stages[stage], weights, self.x[stage, minibatch])
        self.x[stage + 1, minibatch] = self._sent(y, stage + 1, minibatch)

    def _sent(self, x: Any, stage: int, minibatch: int) -> Any:
        """Sends an array to the worker of a stage that has the minibatch."""
        replica = minibatch % self.pipeline.replicas[stage]
        return jax.device_put(x, self.pipeline.device[Worker(stage, replica)])

    def _backward(self, worker: Worker, minibatch: int) -> None:
        number = worker.stage
        stage, versions = self.stages[number], self.pipeline.versions
        weights = self._weights("B", worker, minibatch)
        found, gradient = _gradients(
            self.pipeline.stages[number],
            weights,
            self.x.pop((number, minibatch)),
            self.gradient.pop((number, minibatch)),
        )
        if number:
            self.gradient[number - 1, minibatch] = self._sent(
                gradient, number - 1, minibatch
            )
        stage.needed.pop(minibatch, None)
        update = versions.update_of(number, minibatch)
        waiting = stage.gradients.setdefault(update, {})
        waiting[minibatch] = found
        if len(waiting) == versions.per_update(number):
            self._update(number, [waiting[m] for m in sorted(waiting)])
            del stage.gradients[update]
        self._drop(number)

    def _update(self, number: int, gradients: Sequence[Any]) -> None:
        """Makes the next version."""
        stage, pipeline = self.stages[number], self.pipeline
        first = pipeline.device[Worker(number, 0)]
        gradients = [jax.device_put(g, first) for g in gradients]
        newest = stage.at[stage.newest][0]
        new, stage.state = _updated(pipeline.optimizer, gradients, stage.state, newest)
        stage.newest += 1
        stage.at[stage.newest] = self._copies(number, new)

    def _drop(self, number: int) -> None:
        """Drops versions that no minibatch, in flight or to come, will use."""
        stage, waiting = self.stages[number], self.waiting[number]
        used = [stage.newest, *stage.needed.values()]
        if waiting:
            used.append(self.pipeline.versions.forward(number, min(waiting)))
        for version in [v for v in stage.at if v < min(used)]:
            del stage.at[version]
