"""Algorithms of islands: the training between pulls and pushes, and the store's update.

`GradientIsland` pushes gradients: Downpour and its relatives. `WeightIsland` runs an
optimizer of its own and pushes differences of weights: EASGD and DiLoCo.
"""

import abc
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

from meshpar.islands import updates
from meshpar.islands.island_program import IslandProgram
from meshpar.islands.mode import GRADIENTS, Islands
from meshpar.islands.optax_update import optax_update
from meshpar.islands.rules import UpdateFunction
from meshpar.lowering.state import TrainState


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


class Island(abc.ABC):
    """One island's training between pulls and pushes.

    Args:
      program: what it runs.
      mode: the mode.
      state: a fresh training state.

    Attributes:
      weight: of what it pushes next, in an average.
    """

    pulls_before_push = False
    """Whether it needs the newest weights to compute what it pushes."""

    def __init__(self, program: IslandProgram, mode: Islands, state: TrainState):
        self._program, self._mode, self._state = program, mode, state
        self.vector = program.vector
        self.weight = 0.0

    @abc.abstractmethod
    def fetched(self, center_N: np.ndarray) -> None:
        """Takes the store's weights [N]."""

    @abc.abstractmethod
    def train(self, batch: Any) -> Mapping[str, float]:
        """Trains on a batch; returns its metrics."""

    @abc.abstractmethod
    def contribution(self) -> np.ndarray:
        """The next push [N], for the steps since the last call."""

    def snapshot(self) -> dict[str, np.ndarray]:
        """The island's own state as a flat dict of host arrays."""
        leaves = jax.tree.leaves(jax.device_get(self._state))
        arrays = {f"state|{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
        return arrays | {"weight": np.float64(self.weight)} | self._own()

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        """Takes the state of a snapshot."""
        like, structure = jax.tree.flatten(self._program.abstract_state)
        leaves = [
            jax.device_put(
                np.asarray(snapshot[f"state|{i}"]).astype(leaf.dtype), leaf.sharding
            )
            for i, leaf in enumerate(like)
        ]
        self._state = jax.tree.unflatten(structure, leaves)
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

    def __init__(self, program: IslandProgram, mode: Islands, state: TrainState):
        super().__init__(program, mode, state)
        self.own_N = self.vector.pack(state.params)
        self.sum_N = np.zeros_like(self.own_N)

    def fetched(self, center_N: np.ndarray) -> None:
        """As `Island.fetched`."""
        self._set(center_N.copy())

    def _set(self, own_N: np.ndarray) -> None:
        self.own_N = own_N
        params = {**self._state.params, **self.vector.unpack(own_N)}
        self._state = self._state._replace(params=params)

    def train(self, batch: Any) -> Mapping[str, float]:
        """As `Island.train`."""
        metrics, gradients = self._program(self._state, batch)
        self._state = self._state._replace(step=self._state.step + 1)
        gradient_N = self.vector.pack(gradients)
        found, clip = self._count(metrics), self._program.clip_norm
        found["grad_norm"] = norm = float(np.linalg.norm(gradient_N))
        if clip and norm > clip:
            gradient_N *= np.float32(clip / norm)
        self.sum_N += gradient_N
        if max(self._mode.fetch, self._mode.push) > 1:
            self._set(self.own_N - self._mode.local_learning_rate * gradient_N)
        return found

    def contribution(self) -> np.ndarray:
        """As `Island.contribution`: the mean gradient of the steps since."""
        sum_N = self.sum_N / np.float32(self._mode.push)
        self.sum_N, self.weight = np.zeros_like(self.sum_N), 0.0
        return sum_N

    def _own(self) -> dict[str, np.ndarray]:
        return {"own_N": self.own_N, "sum_N": self.sum_N}


class WeightIsland(Island):
    """Trains with its own optimizer, and pushes differences of weights."""

    def __init__(self, program: IslandProgram, mode: Islands, state: TrainState):
        super().__init__(program, mode, state)
        self.center_N = self.vector.pack(state.params)
        self.pulls_before_push = mode.algorithm == "easgd"

    def fetched(self, center_N: np.ndarray) -> None:
        """As `Island.fetched`; DiLoCo goes on from these weights."""
        self.center_N = center_N.copy()
        if not self.pulls_before_push:
            self._set(center_N)

    def _set(self, own_N: np.ndarray) -> None:
        params = {**self._state.params, **self.vector.unpack(own_N)}
        self._state = self._state._replace(params=params)

    def train(self, batch: Any) -> Mapping[str, float]:
        """As `Island.train`."""
        self._state, metrics = self._program(self._state, batch)
        return self._count(metrics)

    def contribution(self) -> np.ndarray:
        """As `Island.contribution`; EASGD moves its own weights as well."""
        own_N, self.weight = self.vector.pack(self._state.params), 0.0
        if not self.pulls_before_push:
            return self.center_N - own_N
        step_N = np.float32(self._mode.alpha) * (own_N - self.center_N)
        self._set(own_N - step_N)
        return step_N

    def _own(self) -> dict[str, np.ndarray]:
        return {"center_N": self.center_N}


def make_island(program: IslandProgram, mode: Islands, seed: int) -> Island:
    """The island of a mode's algorithm."""
    kind = GradientIsland if mode.algorithm in GRADIENTS else WeightIsland
    return kind(program, mode, program.fresh(seed))
