"""Wei et al. 2015: a budget of bytes for pushes, and eager against lazy reads."""

import functools
from typing import NamedTuple

import matplotlib.figure
import numpy as np

from experiments.gallery.elastic import Tuned, inside_claim
from experiments.gallery.paper import Claim, Paper, Result, Setting
from experiments.stragglers import SIZE, Problem, durations
from meshpar.islands import SSP, Payload, split, updates
from meshpar.islands.managed import KEY_BYTES, ORDERS, ManagedPushes
from meshpar.islands.message_bytes import payload_bytes
from meshpar.islands.messages import Values
from meshpar.islands.rules import Rules
from meshpar.islands.simulated_worker import SimulatedWorker
from meshpar.islands.simulator import Network, Simulator

_WORKERS, _STALENESS = 8, 4
_WHOLE = 4 * SIZE
"""Bytes of a push of all numbers."""

_LARGEST, _RELATIVE, _RANDOM, _TURNS = ORDERS
_RATES = tuple(0.0125 * 2**i for i in range(8))


class Run(NamedTuple):
    """The end of a run.

    Attributes:
      loss: held-out, in nats.
      pushed: bytes of all pushes.
      reads: pulls that were answered with values.
      ages: clocks by which the slowest worker was behind in each read that was used.
    """

    loss: float
    pushed: int
    reads: int
    ages: list[int]


def train(
    budget: int,
    order: str,
    rate: float,
    clocks: int,
    seed: int = 0,
    stragglers: str = "transient",
    lazy: int | None = None,
) -> Run:
    """Trains workers under SSP on a simulated clock, with stragglers of a kind.

    A worker adds its own pushes to what it has read before them.
    """
    problem, (part,) = Problem(seed), split("weights", SIZE, 1)
    name = part.range.name
    rules = Rules(SSP(_STALENESS), updates.sgd(rate))
    network = Network((0.001, 0.003))
    simulator = Simulator([part.range], rules, network=network, seed=seed)
    names = [str(i) for i in range(_WORKERS)]
    simulator.start(names)
    for state in simulator.states(name):
        state.values[:] = problem.start
    managed = {n: ManagedPushes(SIZE, budget, order, int(n)) for n in names}
    seen: dict[str, Values] = {}
    own, pushed = {n: np.zeros(SIZE, np.float32) for n in names}, []

    def task(worker: str, clock: int, read: dict[str, Values]) -> dict[str, Payload]:
        if seen.get(worker) is not read[name]:
            seen[worker], own[worker] = read[name], np.zeros(SIZE, np.float32)
        values = read[name].values - np.float32(rate) * own[worker]
        gradient = problem.gradient(int(worker), clock, values)
        payload = Payload(managed[worker].take(gradient, values))
        own[worker] += gradient
        pushed.append(payload_bytes(payload))
        return {name: payload}

    workers = [
        SimulatedWorker(
            simulator,
            n,
            clocks,
            task,
            durations(stragglers, seed),
            joined=True,
            lazy=lazy,
        )
        for n in names
    ]
    simulator.run(lambda: all(worker.done for worker in workers))
    reads = [(clock, read[name]) for w in workers for clock, read in w.reads]
    return Run(
        problem.loss(simulator.states(name)[0].values),
        sum(pushed),
        len({id(values) for _, values in reads}),
        [clock - values.slowest for clock, values in reads],
    )


class Best(NamedTuple):
    """A case with its best rate.

    Attributes:
      tuned: the first seed's best rate, and its loss.
      losses: by seed, with that rate.
      pushed: bytes of all pushes.
    """

    tuned: Tuned
    losses: list[float]
    pushed: int


def best_of(
    budget: int,
    order: str,
    clocks: int,
    seeds: tuple[int, ...],
    rates: tuple[float, ...] = _RATES,
) -> Best:
    """Losses of a budget and an order, with the best rate."""

    @functools.cache
    def run(rate: float, seed: int) -> Run:
        with np.errstate(all="ignore"):
            return train(budget, order, rate, clocks, seed)

    # All of them: over the rates, losses of small budgets have several valleys.
    tried = np.nan_to_num([run(rate, seeds[0]).loss for rate in rates], nan=np.inf)
    at = int(np.argmin(tried))
    best = Tuned(float(tried[at]), rates[at], 0 < at < len(rates) - 1)
    losses = [run(best.rate, seed).loss for seed in seeds]
    return Best(best, losses, run(best.rate, seeds[0]).pushed)


def order_error(turns: int = 20) -> float:
    """Largest difference of pushes from a sort of all sums, in numpy; inf over budget.

    Counts what is left at the worker as well: nothing may be lost.
    """
    draws, count = np.random.default_rng(0), 8
    managed = ManagedPushes(SIZE, count * KEY_BYTES, _LARGEST)
    waiting, error = np.zeros(SIZE), 0.0
    for _ in range(turns):
        update = (draws.normal(size=SIZE) / 10).astype(np.float32)
        payload = Payload(managed.take(update, update))
        if payload_bytes(payload) > count * KEY_BYTES:
            return float("inf")
        keys, numbers = payload.data
        waiting += update
        largest = np.sort(np.argsort(-np.abs(waiting))[:count])
        sent, wanted = np.zeros(SIZE), np.zeros(SIZE)
        sent[keys], wanted[largest] = numbers, waiting[largest]
        waiting[largest] = 0
        found = max(
            np.abs(sent - wanted).max(), np.abs(managed.unsent_N - waiting).max()
        )
        error = max(error, float(found))
    return error


def order_claim() -> Claim:
    """Whether a push takes the largest sums and keeps to its budget."""
    error = order_error()
    return Claim(
        "a push keeps to its budget, takes the largest sums and loses none, to 1e-6",
        "",
        f"{error:.1e} off a sort of all sums after 20 pushes",
        error < 1e-6,
    )


Found = dict[int, dict[str, Best]]
"""{budget: {order: its best}}; the whole push has the first order alone."""


def budget_claims(found: Found) -> tuple[Claim, ...]:
    """Claims about the loss at equal budgets."""
    small = {budget: by for budget, by in found.items() if budget < _WHOLE}
    whole = found[_WHOLE][_LARGEST]
    mean = lambda best: float(np.mean(best.losses))  # noqa: E731
    words = lambda by: ", ".join(f"{o} {mean(b):.3f}" for o, b in by.items())  # noqa: E731
    least = small[min(small)]
    every = [best for by in found.values() for best in by.values()]
    excess = mean(least[_LARGEST]) - mean(whole)
    gap = mean(least[_RANDOM]) - mean(whole)
    return (
        Claim(
            "at equal budgets the largest updates first beat random ones and turns",
            "the most significant first converge faster (abstract)",
            "; ".join(f"{budget} bytes: {words(by)}" for budget, by in small.items()),
            all(
                mean(by[_LARGEST]) < min(mean(by[_RANDOM]), mean(by[_TURNS]))
                for by in small.values()
            ),
        ),
        Claim(
            "updates relative to their values beat random ones, and not the largest",
            "relative magnitudes are one of its orders",
            "; ".join(
                f"{budget} bytes: {mean(by[_RELATIVE]):.3f}"
                for budget, by in small.items()
            ),
            all(
                mean(by[_LARGEST]) < mean(by[_RELATIVE]) < mean(by[_RANDOM])
                for by in small.values()
            ),
        ),
        Claim(
            f"with {min(small) / _WHOLE:.1%} of the bytes the largest first lose less "
            "than a third of what random ones lose",
            "",
            f"{excess:.3f} against {gap:.3f} nats above whole pushes",
            0 < excess < gap / 3,
        ),
        inside_claim([best.tuned for best in every]),
    )


def read_claims(clocks: int = 40, rate: float = 0.1) -> tuple[Claim, ...]:
    """Claims about eager and lazy reads under the same bound."""
    eager, lazy = (
        train(_WHOLE, _LARGEST, rate, clocks, stragglers="none", lazy=bound)
        for bound in (None, _STALENESS)
    )
    return (
        Claim(
            f"eager and lazy reads keep the bound s={_STALENESS}, and eager ones are "
            "fresher",
            "eager SSP lowers staleness (Dai et al.)",
            f"{np.mean(eager.ages):.2f} against {np.mean(lazy.ages):.2f} clocks late, "
            f"at most {max(eager.ages)} and {max(lazy.ages)}",
            max(eager.ages + lazy.ages) <= _STALENESS
            and np.mean(eager.ages) < np.mean(lazy.ages) - 0.5,
        ),
        Claim(
            "lazy reads pull fewer times, and end at a higher loss",
            "",
            f"{lazy.reads} of {eager.reads} pulls, loss {lazy.loss:.3f} against "
            f"{eager.loss:.3f}",
            lazy.reads < eager.reads and lazy.loss > eager.loss,
        ),
    )


def _run(setting: Setting) -> Result:
    clocks, rates = 60, _RATES[1:-1] if setting.quick else _RATES
    budgets = (64,) if setting.quick else (32, 64, 128, 256, 512)
    found: Found = {}
    for index, budget in enumerate(budgets):
        for order in ORDERS:
            setting.progress(f"{budget} bytes, {order}", index / len(budgets))
            best = best_of(budget, order, clocks, setting.seeds, rates)
            found.setdefault(budget, {})[order] = best
    found[_WHOLE] = {_LARGEST: best_of(_WHOLE, _LARGEST, clocks, setting.seeds, rates)}

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        for order in ORDERS:
            mine = [by[order] for by in found.values() if order in by]
            if order != _LARGEST:
                mine = mine[: len(budgets)]
            sent = [best.pushed / 1e3 for best in mine]
            means = [float(np.mean(best.losses)) for best in mine]
            errors = [float(np.std(best.losses)) for best in mine]
            axes.errorbar(sent, means, errors, fmt="o-", label=order.replace("_", " "))
        axes.set(xscale="log", yscale="log")
        axes.set(xlabel="kB pushed", ylabel="held-out loss, nats")
        axes.legend(title="sent first")

    table = [
        (
            f"{budget:,}",
            order,
            f"{best.pushed / 1e3:,.1f}",
            f"{np.mean(best.losses):.3f}",
            f"{np.std(best.losses):.3f}",
        )
        for budget, by in found.items()
        for order, best in by.items()
    ]
    return Result(
        ("bytes of a push", "first", "kB pushed", "held-out loss", "deviation"),
        tuple(table),
        (order_claim(), *budget_claims(found), *read_claims()),
        {
            "found": {
                b: {o: x._asdict() for o, x in by.items()} for b, by in found.items()
            }
        },
        draw,
    )


PAPER = Paper(
    name="bosen",
    title="Managed communication: important updates first",
    source="Wei et al., SoCC 2015 (Bosen); Dai et al., AAAI 2015, arXiv:1410.8043 "
    "(eager SSP)",
    shows="held-out loss of a small classifier on 8 workers over the bytes pushed, by "
    "the updates that a budget sends first",
    run=_run,
)
