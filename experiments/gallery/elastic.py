"""Elastic averaging and Downpour between exchanges of tau steps, on the simulator.

Gradients and the store are real; only time is simulated.

Source: Zhang, Choromanska and LeCun, EASGD, NeurIPS 2015, arXiv:1412.6651, algorithm 1;
  Dean et al., DistBelief, NeurIPS 2012, section 4.1 (n_fetch and n_push).
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments.stragglers import SIZE, Problem
from meshpar.islands import ASP, Payload, split, updates
from meshpar.islands.messages import Values
from meshpar.islands.rules import Rules
from meshpar.islands.simulated_worker import SimulatedWorker
from meshpar.islands.simulator import Network, Simulator

RATES = (0.03, 0.1, 0.3)
"""Learning rates that are tried; the best counts."""

_BETA = 0.9
"""R times the moving rate alpha of R workers, as in the paper."""

Task = Callable[[int, int, np.ndarray], np.ndarray]
"""(worker, clock, the center that it read) -> what it adds to the center."""


def _downpour(problem: Problem, period: int, rate: float) -> Task:
    """A worker starts from the center and pushes the sum of its steps."""

    def task(worker: int, clock: int, center: np.ndarray) -> np.ndarray:
        own = center.copy()
        for step in range(period):
            own -= rate * problem.gradient(worker, clock * period + step, own)
        return own - center

    return task


def _easgd(problem: Problem, period: int, rate: float, workers: int) -> Task:
    """A worker keeps its own weights; it and the center attract each other."""
    owns = [problem.start.copy() for _ in range(workers)]
    alpha = np.float32(_BETA / workers)

    def task(worker: int, clock: int, center: np.ndarray) -> np.ndarray:
        own = owns[worker]
        difference = alpha * (own - center)
        own -= difference
        for step in range(period):
            own -= rate * problem.gradient(worker, clock * period + step, own)
        return difference

    return task


def _final_loss(
    problem: Problem, task: Task, clocks: int, workers: int, seed: int
) -> float:
    """The loss of the center after every worker has pushed in all of its clocks."""
    (part,) = split("weights", SIZE, 1)
    name = part.range.name
    rules = Rules(ASP(), updates.add)
    simulator = Simulator(
        [part.range], rules, network=Network((0.001, 0.003)), seed=seed
    )
    names = [str(i) for i in range(workers)]
    simulator.start(names)
    for state in simulator.states(name):
        state.values[:] = problem.start

    def push(worker: str, clock: int, read: Mapping[str, Values]) -> dict[str, Payload]:
        return {name: Payload((None, task(int(worker), clock, read[name].values)))}

    draws = np.random.default_rng([seed, 5])

    def duration(worker: str, clock: int) -> float:
        return float(draws.uniform(0.75, 1.25))

    made = [
        SimulatedWorker(simulator, n, clocks, push, duration, joined=True, keeps=1)
        for n in names
    ]
    simulator.run(lambda: all(worker.done for worker in made))
    return problem.loss(simulator.states(name)[0].values)


def losses_by_period(
    periods: Sequence[int], steps: int, workers: int, seed: int
) -> dict[str, dict[int, float]]:
    """{algorithm: {tau: held-out loss after so many steps of every worker}}.

    Each algorithm has the best of `RATES` for each tau.
    """
    problem = Problem(seed)
    found: dict[str, dict[int, float]] = {"Downpour": {}, "EASGD": {}}
    for period in periods:
        losses: dict[str, list[float]] = {name: [] for name in found}
        for rate in RATES:
            tasks = {
                "Downpour": _downpour(problem, period, rate),
                "EASGD": _easgd(problem, period, rate, workers),
            }
            for name, task in tasks.items():
                clocks = steps // period
                loss = _final_loss(problem, task, clocks, workers, seed)
                losses[name].append(loss)
        for name, tried in losses.items():
            found[name][period] = min(tried)
    return found
