"""Training with stragglers on a simulated clock: a small classifier and the store.

Gradients are real; time is simulated, so that results are the same on every machine.

Source: Ho et al., SSP, NeurIPS 2013, figures 2 and 3 (waiting and convergence); Dean et
  al., DistBelief, NeurIPS 2012, figure 5 (time to a target).
"""

import random
from collections.abc import Callable

import numpy as np

from experiments.reports.islands import Result
from meshpar.islands import ASP, BSP, SSP, Payload, split, updates
from meshpar.islands.consistency import Consistency
from meshpar.islands.rules import Rules, UpdateFunction
from meshpar.islands.simulated_worker import SimulatedWorker
from meshpar.islands.simulator import Network, Simulator

INPUTS, HIDDEN, CLASSES, BATCH = 32, 32, 8, 32
SIZE = INPUTS * HIDDEN + HIDDEN * CLASSES
COMPUTE_S = 0.2
"""Mean simulated seconds of one gradient."""

STRAGGLERS = ("none", "transient", "permanent")
"""Kinds: no worker is slow; any worker is 10 times slower in 5% of its steps; the first
worker is always 3 times slower."""


def _unpack(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    cut = INPUTS * HIDDEN
    return weights[:cut].reshape(INPUTS, HIDDEN), weights[cut:].reshape(HIDDEN, CLASSES)


class Problem:
    """Classes of a random teacher network, learned by a smaller one in numpy."""

    def __init__(self, seed: int = 0):
        draws = np.random.default_rng(seed)
        self._first = draws.normal(size=(INPUTS, 64)) / 4
        self._second = draws.normal(size=(64, CLASSES)) / 4
        self.held_out = self._samples(draws, 2048)
        start = draws.normal(size=SIZE) * 0.15
        self.start = start.astype(np.float32)

    def _samples(self, draws: np.random.Generator, count: int):
        x = draws.normal(size=(count, INPUTS))
        scores = np.maximum(x @ self._first, 0) @ self._second
        noisy = scores + 0.1 * draws.gumbel(size=scores.shape)
        return x.astype(np.float32), noisy.argmax(1)

    def gradient(self, worker: int, clock: int, weights: np.ndarray) -> np.ndarray:
        """The gradient of a worker's batch of one clock."""
        x, y = self._samples(np.random.default_rng([7, worker, clock]), BATCH)
        first, second = _unpack(weights)
        hidden = np.maximum(x @ first, 0)
        errors = _softmax(hidden @ second)
        errors[np.arange(BATCH), y] -= 1
        errors /= BATCH
        back = (errors @ second.T) * (hidden > 0)
        parts = (x.T @ back).ravel(), (hidden.T @ errors).ravel()
        return np.concatenate(parts).astype(np.float32)

    def loss(self, weights: np.ndarray) -> float:
        """The loss on held-out samples, in nats."""
        x, y = self.held_out
        first, second = _unpack(weights)
        shares = _softmax(np.maximum(x @ first, 0) @ second)
        return float(-np.log(shares[np.arange(len(y)), y] + 1e-12).mean())


def _softmax(scores: np.ndarray) -> np.ndarray:
    exp = np.exp(scores - scores.max(1, keepdims=True))
    return exp / exp.sum(1, keepdims=True)


def durations(kind: str, seed: int) -> Callable[[str, int], float]:
    """(worker, clock) -> simulated seconds, with stragglers of a kind."""

    def duration(worker: str, clock: int) -> float:
        draws = random.Random(f"{seed} {worker} {clock}")
        seconds = COMPUTE_S * (0.75 + 0.5 * draws.random())
        if kind == "transient" and draws.random() < 0.05:
            seconds *= 10
        if kind == "permanent" and worker == "0":
            seconds *= 3
        return seconds

    return duration


def simulate(
    consistency: Consistency,
    stragglers: str,
    update: UpdateFunction,
    *,
    workers: int = 8,
    seconds: float = 60.0,
    seed: int = 0,
) -> Result:
    """Trains for some simulated seconds.

    Args:
      consistency: which pushes a read waits for.
      stragglers: a kind in `STRAGGLERS`.
      update: the server's update.
      workers: number of workers.
      seconds: simulated seconds.
      seed: of data, speeds and network.
    """
    problem, parts = Problem(seed), split("weights", SIZE, 2)
    simulator = Simulator(
        [part.range for part in parts],
        Rules(consistency, update),
        servers=["server 0", "server 1"],
        network=Network((0.001, 0.003)),
        seed=seed,
    )
    names = [str(i) for i in range(workers)]
    simulator.start(names)
    for part in parts:
        for state in simulator.states(part.range.name):
            state.values[:] = problem.start[part.start : part.stop]

    def task(worker, clock, read):
        weights = np.concatenate([read[part.range.name].values for part in parts])
        gradient = problem.gradient(int(worker), clock, weights)
        return {
            part.range.name: Payload((None, gradient[part.start : part.stop]))
            for part in parts
        }

    curve: list[tuple[float, int, int, float]] = []

    def observe() -> None:
        states = [simulator.states(part.range.name)[0] for part in parts]
        loss = problem.loss(np.concatenate([state.values for state in states]))
        pushes = sum(states[0].clocks.values())
        curve.append((simulator.now, simulator.bytes, pushes, loss))
        simulator.after(seconds / 60, observe)

    duration = durations(stragglers, seed)
    made = [
        SimulatedWorker(simulator, name, 10**9, task, duration, joined=True, keeps=1)
        for name in names
    ]
    observe()
    simulator.run(lambda: simulator.now >= seconds, most_events=10**8)
    waited = sum(s.stop - s.start for w in made for s in w.spans if s.kind == "wait")
    spans = [list(worker.spans) for worker in made]
    share = waited / (workers * seconds)
    return Result(repr(consistency), stragglers, share, curve, spans)


def cases(workers: int) -> list[tuple[str, Consistency, UpdateFunction]]:
    """(name, consistency, update): the same step per gradient everywhere.

    BSP applies the mean of all workers' gradients, hence its rate is their number
    times larger.
    """
    rate = 0.05
    plain: list[tuple[str, Consistency, UpdateFunction]] = [
        ("BSP", BSP(), updates.sgd(rate * workers))
    ]
    for staleness in (1, 3, 10):
        plain.append((f"SSP({staleness})", SSP(staleness), updates.sgd(rate)))
    plain.append(("ASP", ASP(), updates.sgd(rate)))
    plain.append(("Downpour, Adagrad", ASP(), updates.adagrad(0.05)))
    return plain


def sweep(stragglers: str, workers: int, seconds: float) -> list[Result]:
    """The results of all cases with one kind of stragglers."""
    return [
        simulate(
            consistency, stragglers, update, workers=workers, seconds=seconds
        )._replace(case=name)
        for name, consistency, update in cases(workers)
    ]
