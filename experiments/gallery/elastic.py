"""Elastic averaging and Downpour between exchanges of tau steps, on the simulator.

The islands, the server's update and the store are those of `meshpar.islands`; gradients
are computed in numpy, and only time is simulated.

Source: Zhang, Choromanska and LeCun, EASGD, NeurIPS 2015, arXiv:1412.6651, algorithm 1;
  Dean et al., DistBelief, NeurIPS 2012, section 4.1 (n_fetch and n_push).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.gallery.paper import Claim
from experiments.stragglers import SIZE, Problem
from meshpar.islands import ASP, Islands, Payload, algorithms, split
from meshpar.islands.key_range import Contribution
from meshpar.islands.messages import Values
from meshpar.islands.rules import Rules
from meshpar.islands.simulated_worker import SimulatedWorker
from meshpar.islands.simulator import Network, Simulator
from meshpar.lowering.state import TrainState

RATES = tuple(float(f"{3e-4 * 10 ** (i / 2):.2g}") for i in range(9))
"""Learning rates from which the best is taken; it must not be the first or last."""

_FIRST_TRIED = 4
_BETA = 0.9
"""R times the moving rate alpha of R workers, as in the paper."""

DOWNPOUR, EASGD = "Downpour", "EASGD"


class _Vector:
    """Weights that are one vector already; stands for a `WeightsVector`."""

    size = SIZE

    def pack(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.array(arrays["w"], np.float32)

    def unpack(self, vector_N: np.ndarray) -> dict[str, np.ndarray]:
        return {"w": np.array(vector_N, np.float32)}


class NumpyProgram:
    """The part of a program that an island needs, in numpy.

    A batch is (worker, clock). It gives gradients to islands that push them, and steps
    of SGD to the others.

    Args:
      problem: whose gradients it computes.
      rate: of a step.
      pushes_gradients: whether the island does.
    """

    vector, clip_norm = _Vector(), None

    def __init__(self, problem: Problem, rate: float, pushes_gradients: bool):
        self._problem, self._rate = problem, np.float32(rate)
        self._pushes_gradients = pushes_gradients

    def placed(self, leaves: Sequence[np.ndarray]) -> TrainState:
        return TrainState(0, 0, {"w": np.array(leaves[0])}, ())

    def __call__(self, state: TrainState, batch: tuple[int, int]) -> tuple[Any, Any]:
        own = state.params["w"]
        gradient = self._problem.gradient(*batch, own)
        if self._pushes_gradients:
            return {}, {"w": gradient}
        stepped = {"w": own - self._rate * gradient}
        return state.after_step(stepped, ()), {}


def mode_of(algorithm: str, period: int, rate: float, workers: int) -> Islands:
    """The library's mode: a push is worth the steps of its period."""
    if algorithm == EASGD:
        alpha = _BETA / workers
        return Islands(workers, "easgd", ASP(), push=period, alpha=alpha)
    return Islands(
        workers,
        "downpour",
        ASP(),
        fetch=period,
        push=period,
        server_optimizer="sgd",
        learning_rate=rate * period,
        momentum=0.0,
        local_learning_rate=rate,
    )


def final_loss(
    problem: Problem, mode: Islands, rate: float, clocks: int, seed: int
) -> float:
    """The loss of the center after every worker has pushed in all of its clocks."""
    pushes_gradients = mode.algorithm == "downpour"
    program = NumpyProgram(problem, rate, pushes_gradients)
    islands = [
        algorithms.make_island(program, mode, [problem.start])
        for _ in range(mode.workers)
    ]
    (part,) = split("weights", SIZE, 1)
    name = part.range.name
    rules = Rules(mode.consistency, algorithms.server_update(mode))
    network = Network((0.001, 0.003))
    simulator = Simulator([part.range], rules, network=network, seed=seed)
    names = [str(i) for i in range(mode.workers)]
    simulator.start(names)
    for state in simulator.states(name):
        state.values[:] = problem.start

    def push(worker: str, clock: int, read: Mapping[str, Values]) -> dict[str, Payload]:
        island, center = islands[int(worker)], np.array(read[name].values)
        if pushes_gradients:
            island.fetched(center)
        else:
            pushed = np.array(island.contribution(center))
        for step in range(mode.push):
            island.train((int(worker), clock * mode.push + step))
        if pushes_gradients:
            pushed = island.contribution(center)
        return {name: Payload((None, pushed))}

    draws = np.random.default_rng([seed, 5])

    def duration(worker: str, clock: int) -> float:
        return float(draws.uniform(0.75, 1.25))

    made = [
        SimulatedWorker(simulator, n, clocks, push, duration, joined=True, keeps=1)
        for n in names
    ]
    simulator.run(lambda: all(worker.done for worker in made))
    return problem.loss(simulator.states(name)[0].values)


class Tuned(NamedTuple):
    """The best of some rates.

    Attributes:
      loss: with the best rate.
      rate: the best one.
      inside: whether a lower and a higher rate of the grid do worse.
    """

    loss: float
    rate: float
    inside: bool


def tuned(loss_of: Callable[[float], float], rates: Sequence[float]) -> Tuned:
    """Walks down a grid of rates from its middle until both neighbours are worse."""
    loss = functools.cache(lambda i: float(np.nan_to_num(loss_of(rates[i]), nan=1e9)))
    best = min(_FIRST_TRIED, len(rates) - 1)
    while True:
        near = [i for i in (best - 1, best, best + 1) if 0 <= i < len(rates)]
        lowest = min(near, key=loss)
        if lowest == best:
            return Tuned(loss(best), rates[best], len(near) == 3)
        best = lowest


def inside_claim(found: Sequence[Tuned]) -> Claim:
    """Whether all best rates lie inside of what was tried."""
    return Claim(
        "the best rate of each is neither the first nor the last that was tried",
        "",
        f"{sum(one.inside for one in found)} of {len(found)}, "
        f"{min(one.rate for one in found):g} to {max(one.rate for one in found):g}",
        all(one.inside for one in found),
    )


def recurrence_error(period: int = 2, clocks: int = 4, rate: float = 0.1) -> float:
    """Distance of one elastic island and its center from the paper's recurrence.

    Algorithm 1 of the paper, written anew: where tau divides t, the gradient of step t
    is taken first, then x and the center move toward each other by alpha (x - center).
    """
    problem, mode = Problem(0), mode_of(EASGD, period, rate, 1)
    program = NumpyProgram(problem, rate, False)
    island = algorithms.make_island(program, mode, [problem.start])
    update, state = algorithms.server_update(mode), {}
    center, x, wanted = (problem.start.copy() for _ in range(3))
    for step in range(period * clocks):
        gradient = problem.gradient(0, step, x)
        if step % period == 0:
            update(center, state, Contribution("0", 0, island.contribution(center)))
            elastic = _BETA * (x - wanted)
            x, wanted = x - elastic, wanted + elastic
        island.train((0, step))
        x = x - rate * gradient
    own = island.contribution(center) / np.float32(mode.alpha) + center
    return float(max(np.abs(own - x).max(), np.abs(center - wanted).max()))


def adagrad_error(steps: int = 6, rate: float = 0.05) -> float:
    """Distance of Downpour with one worker from Adagrad as its paper writes it."""
    problem = Problem(0)
    mode = Islands(1, "downpour", ASP(), learning_rate=rate)
    program = NumpyProgram(problem, rate, True)
    island = algorithms.make_island(program, mode, [problem.start])
    update, state = algorithms.server_update(mode), {}
    center, x = problem.start.copy(), problem.start.astype(float)
    squares = np.full(SIZE, 0.1)  # Where optax begins, too.
    for step in range(steps):
        island.fetched(center)
        island.train((0, step))
        update(center, state, Contribution("0", step, island.contribution(center)))
        gradient = problem.gradient(0, step, x)
        squares += gradient**2
        x -= rate * gradient / np.sqrt(squares)
    return float(np.abs(center - x).max())


def losses_by_period(
    periods: Sequence[int], steps: int, workers: int, seed: int
) -> dict[str, dict[int, Tuned]]:
    """{algorithm: {tau: held-out loss after so many steps of every worker}}.

    Each algorithm has the best of `RATES` for each tau.
    """
    problem = Problem(seed)
    return {
        name: {
            period: tuned(
                lambda rate, name=name, period=period: final_loss(
                    problem,
                    mode_of(name, period, rate, workers),
                    rate,
                    steps // period,
                    seed,
                ),
                RATES,
            )
            for period in periods
        }
        for name in (DOWNPOUR, EASGD)
    }
