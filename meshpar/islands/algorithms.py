"""Algorithms of islands: the training between pulls and pushes, and the store's update.

`GradientIsland` pushes gradients: Downpour and its relatives. `WeightIsland` runs an
optimizer of its own and pushes differences of weights: EASGD and DiLoCo.
"""

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from meshpar.islands import updates
from meshpar.islands.island_program import IslandProgram
from meshpar.islands.mode import GRADIENTS, Islands
from meshpar.islands.optax_update import optax_update
from meshpar.islands.push_filters import filter_decoders
from meshpar.islands.rules import Decoder, UpdateFunction
from meshpar.islands.wire import decoders


def server_update(mode: Islands) -> UpdateFunction:
    """The update that the store makes with a push, or with an average of pushes."""
    if mode.algorithm == "easgd":
        return updates.add
    rate = mode.learning_rate
    if mode.algorithm == "diloco":
        return updates.sgd(rate, mode.momentum, nesterov=True)
    update = {
        "adagrad": lambda: updates.adagrad(rate),
        "adam": lambda: optax_update(optax.adam(rate)),
        "sgd": lambda: updates.sgd(rate, mode.momentum),
    }[mode.server_optimizer]()
    if mode.algorithm == "damped":
        return updates.staleness_damped(update)
    if mode.algorithm == "compensated":
        return updates.delay_compensated(update, mode.compensation)
    return update


def mode_decoders(mode: Islands) -> Mapping[str, Decoder]:
    """{encoding: decoder} of the pushes of a mode, for the store."""
    return {**decoders(mode.wire), **filter_decoders(mode.filters)}


class Island(abc.ABC):
    """One island's training between pulls and pushes.

    Args:
      program: what it runs.
      mode: the mode.
      start: leaves of the training state that it starts from, on the host; its first
        `fetched` puts the store's weights into it.

    Attributes:
      weight: of what it pushes next, in an average.
      read_N: the weights [N] of its newest gradient, where the store needs them.
    """

    pulls_before_push = False
    """Whether it needs the newest weights to compute what it pushes."""

    def __init__(
        self, program: IslandProgram, mode: Islands, start: Sequence[np.ndarray]
    ):
        self._program, self._mode = program, mode
        self._state = program.placed(start)
        self.vector = program.vector
        self.weight = 0.0
        self.read_N: np.ndarray | None = None

    @abc.abstractmethod
    def fetched(self, center_N: np.ndarray) -> None:
        """Goes on from the store's weights [N]."""

    @abc.abstractmethod
    def train(self, batch: Any) -> Mapping[str, float]:
        """Trains on a batch; returns its metrics."""

    @abc.abstractmethod
    def contribution(self, center_N: np.ndarray) -> np.ndarray:
        """The next push [N], for the steps since the last call.

        Args:
          center_N: the newest of the store's weights that its worker has read.
        """

    def snapshot(self) -> dict[str, np.ndarray]:
        """The island's own state as a flat dict of host arrays."""
        leaves = jax.tree.leaves(jax.device_get(self._state))
        arrays = {f"state|{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
        return arrays | {"weight": np.float64(self.weight)} | self._own()

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        """Takes the state of a snapshot."""
        count = len(jax.tree.leaves(self._state))
        leaves = [snapshot[f"state|{i}"] for i in range(count)]
        self._state = self._program.placed(leaves)
        self.weight = float(snapshot["weight"])
        for name in self._own():
            setattr(self, name, np.array(snapshot[name]))

    @abc.abstractmethod
    def _own(self) -> dict[str, np.ndarray]:
        """Vectors besides the training state, by attribute."""

    def _count(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        found = {k: float(v) for k, v in jax.device_get(dict(metrics)).items()}
        self.weight += found.get("weight", 1.0)
        return found


class GradientIsland(Island):
    """Pushes sums of gradients, and moves its own weights by SGD between pulls."""

    def __init__(
        self, program: IslandProgram, mode: Islands, start: Sequence[np.ndarray]
    ):
        super().__init__(program, mode, start)
        self.own_N = self.vector.pack(self._state.params)
        if mode.algorithm == "compensated":
            self.read_N = self.own_N
        self.sum_N = np.zeros_like(self.own_N)

    def fetched(self, center_N: np.ndarray) -> None:
        self._set(center_N.copy())

    def _set(self, own_N: np.ndarray) -> None:
        self.own_N = own_N
        params = {**self._state.params, **self.vector.unpack(own_N)}
        self._state = self._state._replace(params=params)

    def train(self, batch: Any) -> Mapping[str, float]:
        metrics, gradients = self._program(self._state, batch)
        state = self._state
        self._state = state.after_step(state.params, state.optimizer_state)
        gradient_N = self.vector.pack(gradients)
        found, clip = self._count(metrics), self._program.clip_norm
        found["grad_norm"] = norm = float(np.linalg.norm(gradient_N))
        if clip and norm > clip:
            gradient_N *= np.float32(clip / norm)
        self.sum_N += gradient_N
        if self.read_N is not None:
            self.read_N = self.own_N
        if max(self._mode.fetch, self._mode.push) > 1:
            self._set(self.own_N - self._mode.local_learning_rate * gradient_N)
        return found

    def contribution(self, center_N: np.ndarray) -> np.ndarray:
        """The mean gradient of the steps since the last push."""
        del center_N
        sum_N = self.sum_N / np.float32(self._mode.push)
        self.sum_N, self.weight = np.zeros_like(self.sum_N), 0.0
        return sum_N

    def _own(self) -> dict[str, np.ndarray]:
        own = {"own_N": self.own_N, "sum_N": self.sum_N}
        return own if self.read_N is None else own | {"read_N": self.read_N}


class WeightIsland(Island):
    """Trains with its own optimizer, and pushes differences of weights.

    EASGD takes the store's weights at its birth alone. From then on it moves toward
    the center by what it pushes, together with its next step: as in the paper, the
    gradient of that step is taken before the move.

    Attributes:
      elastic_N: the move toward the center that comes with the next step.
    """

    def __init__(
        self, program: IslandProgram, mode: Islands, start: Sequence[np.ndarray]
    ):
        super().__init__(program, mode, start)
        self.elastic_N = np.zeros(self.vector.size, np.float32)
        self.pulls_before_push = mode.algorithm == "easgd"

    def fetched(self, center_N: np.ndarray) -> None:
        self._set(center_N)

    def _set(self, own_N: np.ndarray) -> None:
        params = {**self._state.params, **self.vector.unpack(own_N)}
        self._state = self._state._replace(params=params)

    def train(self, batch: Any) -> Mapping[str, float]:
        self._state, metrics = self._program(self._state, batch)
        if self.elastic_N.any():
            self._set(self.vector.pack(self._state.params) - self.elastic_N)
            self.elastic_N = np.zeros_like(self.elastic_N)
        return self._count(metrics)

    def contribution(self, center_N: np.ndarray) -> np.ndarray:
        own_N, self.weight = self.vector.pack(self._state.params), 0.0
        if not self.pulls_before_push:
            return center_N - own_N
        self.elastic_N = np.float32(self._mode.alpha) * (own_N - center_N)
        return self.elastic_N

    def _own(self) -> dict[str, np.ndarray]:
        return {"elastic_N": self.elastic_N}


def make_island(
    program: IslandProgram, mode: Islands, start: Sequence[np.ndarray]
) -> Island:
    """The island of a mode's algorithm; takes the arguments of `Island`."""
    kind = GradientIsland if mode.algorithm in GRADIENTS else WeightIsland
    return kind(program, mode, start)
