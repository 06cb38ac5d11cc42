"""Dean et al. 2012: L-BFGS on servers that hold ranges; backups of slow workers."""

import matplotlib.figure

from experiments.convex import batch
from experiments.data import hashed_text
from experiments.gallery.paper import Claim, Paper, Result, Setting

_WORKERS, _SERVERS, _MEMORY = 4, 2, 10
_SLOWDOWN = 10.0
_PORTIONS = (1, 2, 5, 10, 25, 50, 100, 200)
_MOST = 1.3
_EQUAL = 1e-6


def cost(portions: int, backup: bool, workers: int = _WORKERS) -> float:
    """Time of a batch with one slow worker over that of a batch without."""
    slow = [1.0] * (workers - 1) + [1 / _SLOWDOWN]
    whole = batch.Workers([1.0] * workers, portions, backup).run().seconds
    return batch.Workers(slow, portions, backup).run().seconds / whole


def least_cost(workers: int = _WORKERS) -> float:
    """The time if all workers ended at once: no schedule can be below it."""
    return workers / (workers - 1 + 1 / _SLOWDOWN)


def objectives(
    problem: batch.Problem, iterations: int
) -> tuple[list[float], list[float]]:
    """(ours, SciPy's) after each iteration."""
    workers = batch.Workers([1.0] * _WORKERS, _PORTIONS[-1], True)
    trained = batch.Sandblaster(problem, workers, _SERVERS, _MEMORY)
    ours = [done.value for done in trained.coordinator.run(iterations)]
    return ours, batch.scipy_values(problem, _MEMORY, iterations)


def claims_of(
    ours: list[float], scipy: list[float], costs: dict[bool, dict[int, float]]
) -> list[Claim]:
    """Whether it is L-BFGS, and what a straggler costs.

    Args:
      ours: objectives by iteration.
      scipy: those of SciPy.
      costs: {whether there are backups: {portions per worker: cost}}.
    """
    pairs = zip(ours, scipy, strict=True)
    difference = max(abs(a / b - 1) for a, b in pairs)
    many, few = costs[True][_PORTIONS[-1]], costs[False][1]
    late = {n: (cost - least_cost()) * n for n, cost in costs[True].items()}
    without = {n: (cost - least_cost()) * n for n, cost in costs[False].items()}
    return [
        Claim(
            f"equals SciPy's L-BFGS in each of {len(ours)} iterations, to 1e-6",
            "",
            f"{difference:.1e} off",
            difference <= _EQUAL,
        ),
        Claim(
            f"a worker that is {_SLOWDOWN:g} times slower costs less than {_MOST}x, "
            "with small portions and backups",
            "portions much smaller than 1/N, and backups (section 4.2)",
            f"{many:.3f}x; {few:.0f}x with one portion per worker",
            many < _MOST,
        ),
        # A free worker ends its portion, and then copies that of the slow worker.
        Claim(
            "with backups a batch ends less than two portions after the least time",
            "backup copies of the last portions (section 4.2)",
            f"at most {max(late.values()):.2f} portions after it, "
            f"{max(without.values()):.1f} without",
            0 <= min(late.values()) and max(late.values()) <= 2,
        ),
        Claim(
            "backups never cost time",
            "",
            f"{costs[False][2]:.2f}x to {costs[True][2]:.2f}x with 2 portions",
            all(costs[True][n] <= costs[False][n] for n in _PORTIONS),
        ),
    ]


def _run(setting: Setting) -> Result:
    rows, bits, iterations = (2000, 12, 20) if setting.quick else (20_000, 14, 50)
    setting.progress("L-BFGS", 0.0)
    text = hashed_text.load(hashed_text.STANDARD_LIBRARY, bits, rows)
    ours, scipy = objectives(batch.Problem(text.rows, text.labels, 1.0), iterations)
    setting.progress("stragglers", 0.8)
    costs = {b: {n: cost(n, b) for n in _PORTIONS} for b in (False, True)}

    def draw(figure: matplotlib.figure.Figure) -> None:
        left, right = figure.subplots(1, 2)
        left.plot(range(1, len(scipy) + 1), scipy, "-", label="SciPy")
        left.plot(range(1, len(ours) + 1), ours, "x", label="Sandblaster")
        left.set(xlabel="iterations", ylabel="objective", yscale="log")
        left.legend()
        for backup, found in costs.items():
            name = "with backups" if backup else "without backups"
            right.plot(list(found), list(found.values()), "o-", label=name)
        right.axhline(
            least_cost(), color="black", linestyle=":", label="least that can be"
        )
        right.set(
            xscale="log",
            yscale="log",
            xlabel="portions per worker",
            ylabel="time of a batch with a straggler",
        )
        right.set_yticks([1, 2, 5, 10], ["1x", "2x", "5x", "10x"])
        right.minorticks_off()
        right.legend()

    table = [
        (str(n), f"{costs[False][n]:.3f}x", f"{costs[True][n]:.3f}x") for n in _PORTIONS
    ]
    return Result(
        ("portions per worker", "straggler costs", "with backups"),
        (*table, ("least that can be", f"{least_cost():.3f}x", "")),
        tuple(claims_of(ours, scipy, costs)),
        {"objectives": ours, "scipy": scipy, "costs": costs},
        draw,
    )


PAPER = Paper(
    name="sandblaster",
    title="Sandblaster L-BFGS: a straggler among the workers",
    source="Dean et al., DistBelief, NeurIPS 2012, section 4.2",
    shows="objective over iterations beside SciPy's, and what one slow worker of four "
    "costs over the portions of a batch, on a simulated clock",
    run=_run,
)
