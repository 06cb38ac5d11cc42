"""Damped and delay-compensated updates against plain ones, under a fixed staleness."""

import functools
from collections.abc import Callable, Sequence

import matplotlib.figure
import numpy as np

from experiments.gallery.elastic import NumpyProgram, Tuned, tuned
from experiments.gallery.paper import Claim, Paper, Result, Setting
from experiments.stragglers import CLASSES, SIZE, Problem
from meshpar.islands import ASP, Islands, Payload, Store, algorithms, split

_WORKERS = 16
_PLAIN, _DAMPED, _COMPENSATED = "downpour", "damped", "compensated"
_NAMES = {_PLAIN: "plain", _DAMPED: "damped", _COMPENSATED: "compensated"}
_RATES = tuple(0.0125 * 2**i for i in range(13))
_STRENGTHS = (0.125, 0.5, 2.0, 8.0, 32.0, 128.0, 512.0)
_NOISE = 0.03
"""Nats by which two runs of one problem may differ."""


def mode_of(
    algorithm: str, workers: int, rate: float, strength: float = 0.0
) -> Islands:
    """The library's mode, with SGD in the store."""
    return Islands(
        workers,
        algorithm,
        ASP(),
        server_optimizer="sgd",
        learning_rate=rate,
        momentum=0.0,
        compensation=strength,
    )


def train(problem: Problem, mode: Islands, steps: int) -> np.ndarray:
    """The store's weights after pushes of workers that take turns.

    Each of R workers reads after its push, so that from step R on every gradient is
    late by R - 1 updates.
    """
    (part,) = split("weights", SIZE, 1)
    name = part.range.name
    store = Store([part.range], mode.consistency, algorithms.server_update(mode))
    store.set_values(name, problem.start)
    program = NumpyProgram(problem, 0.0, True)
    islands, read = [], []
    for index in range(mode.workers):
        store.join(str(index))
        islands.append(algorithms.make_island(program, mode, [problem.start]))
        read.append(store.pull(name))
        islands[index].fetched(np.array(read[index].values))
    for step in range(steps):
        clock, index = divmod(step, mode.workers)
        island, version = islands[index], read[index].version
        island.train((0, step))
        pushed = island.contribution(read[index].values)
        payload = Payload((None, pushed), version=version, read=island.read_N)
        store.push(name, str(index), clock, payload)
        read[index] = store.pull(name)
        island.fetched(np.array(read[index].values))
    return np.array(store.pull(name).values)


def recurrence(
    problem: Problem,
    algorithm: str,
    late: int,
    rate: float,
    strength: float,
    steps: int,
) -> np.ndarray:
    """The papers' updates with gradients that are `late` updates old, in numpy."""
    past = [problem.start.astype(float)]
    for step in range(steps):
        delay = min(step, late)
        old, new = past[step - delay], past[step]
        g = problem.gradient(0, step, old.astype(np.float32)).astype(float)
        if algorithm == _COMPENSATED:
            g = g + strength * g * g * (new - old)
        if algorithm == _DAMPED:
            g = g / (1 + delay)
        past.append(new - rate * g)
    return past[-1]


def recurrence_claims(steps: int = 40) -> tuple[Claim, ...]:
    """Whether stores make the updates of the papers."""
    problem, claims = Problem(0), []
    sources = {_PLAIN: "", _DAMPED: "rate over delay", _COMPENSATED: "equation 9"}
    for algorithm, source in sources.items():
        mode = mode_of(algorithm, 4, 0.1, 8.0)
        wanted = recurrence(problem, algorithm, 3, 0.1, 8.0, steps)
        error = float(np.abs(train(problem, mode, steps) - wanted).max())
        claims.append(
            Claim(
                f"{_NAMES[algorithm]} pushes equal their recurrence in numpy, to 1e-6",
                source,
                f"{error:.1e} off after {steps} steps of 4 workers",
                error < 1e-6,
            )
        )
    return tuple(claims)


def synchronous(problem: Problem, workers: int, rate: float, steps: int) -> float:
    """The loss of SGD with the mean of all workers' gradients, in numpy."""
    w = problem.start.copy()
    for first in range(0, steps - workers + 1, workers):
        batches = range(first, first + workers)
        w -= rate * np.mean([problem.gradient(0, i, w) for i in batches], axis=0)
    return problem.loss(w)


class Losses:
    """Held-out losses of one problem by algorithm and rate, computed once each."""

    def __init__(self, seed: int, steps: int):
        self._problem, self._steps = Problem(seed), steps
        self.loss = functools.cache(self._loss)

    def _loss(
        self, algorithm: str, workers: int, rate: float, strength: float = 0.0
    ) -> float:
        mode = mode_of(algorithm, workers, rate, strength)
        with np.errstate(all="ignore"):
            found = self._problem.loss(train(self._problem, mode, self._steps))
        return float(np.nan_to_num(found, nan=1e9))

    def best(self, algorithm: str, workers: int, strength: float = 0.0) -> Tuned:
        """With the best rate."""
        return tuned(lambda rate: self.loss(algorithm, workers, rate, strength), _RATES)

    def synchronous(self, workers: int) -> Tuned:
        """Of the mean of all workers, with the best rate."""
        return tuned(
            lambda rate: synchronous(self._problem, workers, rate, self._steps), _RATES
        )

    def strength(self, workers: int, rate: float) -> Tuned:
        """The best strength of compensation at a rate; its `rate` is the strength."""
        loss: Callable[[float], float] = lambda x: self.loss(  # noqa: E731
            _COMPENSATED, workers, rate, x
        )
        return tuned(loss, _STRENGTHS)


def claims_of(losses: Losses, workers: int = _WORKERS) -> tuple[Claim, ...]:
    """Claims about what damping and compensation buy at rates of other training."""
    alone, plain = losses.best(_PLAIN, 1), losses.best(_PLAIN, workers)
    damped, together = losses.best(_DAMPED, workers), losses.synchronous(workers)
    strength = losses.strength(workers, alone.rate)
    late = losses.loss(_PLAIN, workers, alone.rate)
    undamped = losses.loss(_PLAIN, workers, together.rate)
    at_rate = losses.loss(_DAMPED, workers, together.rate)
    best = (alone, plain, damped, together, strength)
    return (
        Claim(
            "with the rate of SGD without delay, compensation takes back half of what "
            "the delay costs",
            "nearly sequential SGD (DC-ASGD, abstract)",
            f"loss {late:.3f} becomes {strength.loss:.3f}; without delay "
            f"{alone.loss:.3f}, rate {alone.rate:g}, lambda {strength.rate:g}",
            strength.loss - alone.loss < (late - alone.loss) / 2,
        ),
        Claim(
            "with the rate of the synchronous mean, damped pushes train and plain ones "
            "do not",
            "rate of synchronous SGD over delay (Zhang et al., section 3.2)",
            f"loss {at_rate:.3f} against {undamped:.3g}, rate {together.rate:g}",
            at_rate < 1.0 < undamped,
        ),
        Claim(
            "under a fixed staleness damping is a smaller rate: the best ones are "
            f"{workers} times apart",
            "",
            f"{damped.rate:g} over {plain.rate:g}",
            damped.rate == workers * plain.rate,
        ),
        Claim(
            "no best rate or strength is the first or the last that was tried",
            "",
            f"{sum(one.inside for one in best)} of {len(best)}",
            all(one.inside for one in best),
        ),
    )


def tuned_claim(found: dict[str, dict[int, list[float]]]) -> Claim:
    """Whether anything is gained where each case has its best rate.

    Args:
      found: {case: {workers: losses by seed}}.
    """
    plain, damped, compensated = (
        np.array(found[f"{name}, best rate"][_WORKERS]) for name in _NAMES.values()
    )
    gains = float((plain - compensated).mean()), float((plain - damped).mean())
    return Claim(
        "with the best rate of each, compensation still gains on plain pushes, and "
        f"damping less than {_NOISE:g} nats",
        "DC-ASGD is better than ASGD (abstract)",
        f"compensation {gains[0]:+.3f}, damping {gains[1]:+.3f} nats",
        gains[0] > 0 and abs(gains[1]) < _NOISE,
    )


def _curves(losses: Losses, counts: Sequence[int]) -> dict[str, dict[int, float]]:
    """{case: {workers: loss}}, at the rate of no delay and at the best one."""
    rate = losses.best(_PLAIN, 1).rate
    found: dict[str, dict[int, float]] = {}
    for workers in counts:
        strength = losses.strength(workers, rate)
        cases = {
            "plain, rate of no delay": losses.loss(_PLAIN, workers, rate),
            "compensated, rate of no delay": strength.loss,
            "plain, best rate": losses.best(_PLAIN, workers).loss,
            "damped, best rate": losses.best(_DAMPED, workers).loss,
            "compensated, best rate": losses.best(
                _COMPENSATED, workers, strength.rate
            ).loss,
        }
        for case, loss in cases.items():
            found.setdefault(case, {})[workers] = loss
    return found


def _run(setting: Setting) -> Result:
    steps, counts = 600, (_WORKERS,) if setting.quick else (2, 4, 8, _WORKERS)
    setting.progress("claims", 0.0)
    losses = Losses(setting.seeds[0], steps)
    claims = claims_of(losses)
    curves = []
    for index, seed in enumerate(setting.seeds):
        setting.progress(f"staleness, seed {seed}", 0.3 + 0.2 * index)
        curves.append(_curves(losses if not index else Losses(seed, steps), counts))
    found = {
        case: {n: [curve[case][n] for curve in curves] for n in counts}
        for case in curves[0]
    }

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        for case, by_count in found.items():
            bounded = [np.minimum(x, np.log(CLASSES)) for x in by_count.values()]
            means = [float(np.mean(x)) for x in bounded]
            errors = [float(np.std(x)) for x in bounded]
            style = "o--" if "no delay" in case else "s-"
            late = [n - 1 for n in by_count]
            axes.errorbar(late, means, errors, fmt=style, label=case)
        axes.set(xlabel="updates that a gradient is late", ylabel="held-out loss, nats")
        axes.set_ylim(0.4, 1.2)  # A guess has a loss of 2.1.
        axes.legend(fontsize=8)

    table = [
        (case, str(n - 1), f"{np.mean(x):.3f}", f"{np.std(x):.3f}")
        for case, by_count in found.items()
        for n, x in by_count.items()
    ]
    return Result(
        ("case", "staleness", "held-out loss", "deviation over seeds"),
        tuple(table),
        (*recurrence_claims(), *claims, tuned_claim(found)),
        {"losses": found},
        draw,
    )


PAPER = Paper(
    name="delay_compensation",
    title="Late gradients, damped and compensated",
    source="Zheng et al., ICML 2017, arXiv:1609.08326 (DC-ASGD); Zhang et al., "
    "IJCAI 2016, arXiv:1511.05950 (staleness-aware)",
    shows="held-out loss of a small classifier after 600 pushes, over the staleness of "
    "the gradients, at one rate and at the best rate of each",
    run=_run,
)
