"""Stale synchronous, Downpour and elastic averaging training on a simulated clock."""

import bisect
import functools

import matplotlib.figure
import numpy as np

from experiments.gallery import elastic
from experiments.gallery.paper import Claim, Paper, Result, Setting
from experiments.reports.islands import Result as Run
from experiments.reports.islands import target
from experiments.stragglers import simulate
from meshpar.islands import ASP, BSP, SSP, updates
from meshpar.islands.consistency import Consistency
from meshpar.islands.rules import UpdateFunction

_WORKERS = 8
_STALENESS = (0, 1, 2, 4, 8)
_PERIODS = (1, 4, 16, 64)
_BETTER_FROM = 16
"""The period from which the paper finds elastic averaging better."""

_STRAGGLERS = "transient"
_BSP, _SSP, _DOWNPOUR = "BSP", "SSP(3)", "Downpour, Adagrad"
_BSP_RATES = tuple(0.1 * 2**i for i in range(9))
"""Rates of BSP, from which the best one is taken."""


def _waiting(setting: Setting, seconds: float) -> dict[int, list[Run]]:
    """{s: runs with a bound s, by seed}."""
    found = {}
    for staleness in _STALENESS:
        rate = 0.05 * (_WORKERS if staleness == 0 else 1)
        found[staleness] = [
            simulate(
                SSP(staleness),
                _STRAGGLERS,
                updates.sgd(rate),
                workers=_WORKERS,
                seconds=seconds,
                seed=seed,
            )
            for seed in setting.seeds
        ]
    return found


def clock_gap(run: Run) -> int:
    """The most clocks that a worker was ahead of another when it began to compute.

    From the spans of the workers alone: a worker that begins its clock c holds the
    pushes that others had sent by then, one at the end of each of their computations.
    """
    begins = [[s.start for s in spans if s.kind == "compute"] for spans in run.spans]
    ends = [[s.stop for s in spans if s.kind == "compute"] for spans in run.spans]
    return max(
        clock - min(bisect.bisect_right(other, start) for other in ends)
        for starts in begins
        for clock, start in enumerate(starts)
    )


def _seconds_to_target(seconds: float) -> tuple[dict[str, float | None], elastic.Tuned]:
    """Simulated seconds to the loss that the best BSP has after two thirds, and BSP."""

    def run(consistency: Consistency, update: UpdateFunction, name: str) -> Run:
        found = simulate(
            consistency, _STRAGGLERS, update, workers=_WORKERS, seconds=seconds
        )
        return found._replace(case=name)

    bsp = functools.cache(lambda rate: run(BSP(), updates.sgd(rate), _BSP))
    best = elastic.tuned(lambda rate: bsp(rate).curve[-1][3], _BSP_RATES)
    results = [bsp(best.rate)]
    results.append(run(SSP(3), updates.sgd(best.rate / _WORKERS), _SSP))
    results.append(run(ASP(), updates.adagrad(0.05), _DOWNPOUR))
    goal = target(results, _STRAGGLERS)
    return {result.case: result.seconds_to(goal) for result in results}, best


def recurrence_claims() -> tuple[Claim, ...]:
    """Whether single islands follow the recurrences of their papers."""
    names = {
        "one elastic island equals algorithm 1 of its paper, to 1e-5": (
            elastic.recurrence_error()
        ),
        "Downpour with one worker equals Adagrad, to 1e-5": elastic.adagrad_error(),
    }
    return tuple(
        Claim(text, "", f"{error:.1e} off", error < 1e-5)
        for text, error in names.items()
    )


def waiting_claims(
    waiting: dict[int, float], gaps: dict[int, int]
) -> tuple[Claim, ...]:
    """Claims about the bound: it is kept, it is reached, and it saves waiting."""
    shares = list(waiting.values())
    return (
        Claim(
            "the largest gap between two workers' clocks is s, from their spans",
            "at most s",
            ", ".join(f"{gap} (s={s})" for s, gap in gaps.items()),
            all(gap == s for s, gap in gaps.items()),
        ),
        Claim(
            "waiting falls with every step of staleness",
            "less time on waiting (figure 2)",
            " > ".join(f"{share:.1%}" for share in shares),
            all(b < a for a, b in zip(shares, shares[1:], strict=False)),
        ),
    )


def target_claims(
    seconds: dict[str, float | None], best: elastic.Tuned
) -> tuple[Claim, ...]:
    """Claims about the time to a loss, against BSP with its best rate."""
    bsp, ssp, downpour = (
        seconds[case] or float("inf") for case in (_BSP, _SSP, _DOWNPOUR)
    )
    return (
        Claim(
            "SSP(3) is at the target before BSP with its best rate",
            "faster than BSP",
            f"{ssp:.0f} against {bsp:.0f} simulated seconds",
            ssp < bsp and best.inside,
        ),
        Claim(
            "Downpour with Adagrad is at the target before BSP with its best rate",
            "best time to a fixed accuracy",
            f"{downpour:.0f} against {bsp:.0f} simulated seconds, BSP's rate "
            f"{best.rate:g}",
            downpour < bsp and best.inside,
        ),
    )


def period_claims(
    periods: dict[str, dict[int, elastic.Tuned]],
) -> tuple[Claim, ...]:
    """Claims about periods; both algorithms have their best rate for each of them."""
    found = [one for by_period in periods.values() for one in by_period.values()]
    late = [period for period in periods[elastic.EASGD] if period >= _BETTER_FROM]
    pairs = {
        period: (periods[elastic.EASGD][period], periods[elastic.DOWNPOUR][period])
        for period in late
    }
    return (
        Claim(
            f"elastic averaging tolerates long periods, tau={late[0]} to {late[-1]}",
            "better than Downpour from tau=16 (figure 4)",
            "; ".join(
                f"loss {one.loss:.3f} against Downpour's {other.loss:.3f}"
                for one, other in pairs.values()
            ),
            all(one.loss < other.loss for one, other in pairs.values()),
        ),
        elastic.inside_claim(found),
    )


def _run(setting: Setting) -> Result:
    seconds = 20.0 if setting.quick else 60.0
    setting.progress("waiting", 0.0)
    runs = _waiting(setting, seconds)
    waiting = {s: [run.waiting for run in found] for s, found in runs.items()}
    gaps = {s: max(map(clock_gap, found)) for s, found in runs.items()}
    setting.progress("time to a loss", 0.4)
    times, best = _seconds_to_target(seconds)
    setting.progress("periods", 0.6)
    steps = 128 if setting.quick else 512
    periods = elastic.losses_by_period(_PERIODS, steps, _WORKERS, setting.seeds[0])
    shares = {s: float(np.mean(found)) for s, found in waiting.items()}
    rows = [(f"SSP({s}): waiting", f"{share:.1%}") for s, share in shares.items()]
    for case, found in times.items():
        rows.append((f"{case}: seconds to the target", f"{found or float('nan'):.1f}"))
    for name, by_period in periods.items():
        losses = (f"{x.loss:.3f} (tau={tau})" for tau, x in by_period.items())
        rows.append((f"{name}: loss", ", ".join(losses)))

    def draw(figure: matplotlib.figure.Figure) -> None:
        left, right = figure.subplots(1, 2)
        errors = [100 * float(np.std(found)) for found in waiting.values()]
        heights = [100 * share for share in shares.values()]
        left.errorbar(list(shares), heights, errors, fmt="o-")
        left.set(xlabel="staleness s", ylabel="time spent waiting, %", ylim=0)
        for name, by_period in periods.items():
            losses = [one.loss for one in by_period.values()]
            right.plot(list(by_period), losses, "o-", label=name)
        right.set(
            xscale="log",
            yscale="log",
            xlabel="steps per exchange, tau",
            ylabel="loss, nats",
        )
        right.set_xticks(_PERIODS, map(str, _PERIODS))
        right.minorticks_off()
        right.legend()

    return Result(
        ("case", "found"),
        tuple(rows),
        (
            *waiting_claims(shares, gaps),
            *target_claims(times, best),
            *recurrence_claims(),
            *period_claims(periods),
        ),
        {"waiting": waiting, "seconds_to_target": times, "loss_by_period": periods},
        draw,
    )


PAPER = Paper(
    name="staleness",
    title="Waiting and loss of asynchronous training",
    source="Ho et al., NeurIPS 2013, figure 2 (SSP); Dean et al., NeurIPS 2012, "
    "figure 5 (Downpour); Zhang et al., EASGD, NeurIPS 2015, arXiv:1412.6651, figure 4",
    shows="share of the time that workers wait over the staleness bound, and loss over "
    "the period of EASGD and Downpour, on a simulated clock",
    run=_run,
)
