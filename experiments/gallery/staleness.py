"""Stale synchronous, Downpour and elastic averaging training on a simulated clock."""

import matplotlib.figure
import numpy as np

from experiments.gallery.elastic import losses_by_period
from experiments.gallery.paper import Claim, Paper, Result, Setting
from experiments.reports.islands import target
from experiments.stragglers import cases, simulate
from meshpar.islands import SSP, updates

_WORKERS = 8
_STALENESS = (0, 1, 2, 4, 8)
_PERIODS = (1, 4, 16, 64)
_STRAGGLERS = "transient"


def _waiting(setting: Setting, seconds: float) -> dict[int, list[float]]:
    """{s: share of the workers' time that they wait, by seed}."""
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
            ).waiting
            for seed in setting.seeds
        ]
    return found


def _seconds_to_target(seconds: float) -> dict[str, float | None]:
    """{case: simulated seconds to the loss that BSP has after two thirds}."""
    results = [
        simulate(
            consistency, _STRAGGLERS, update, workers=_WORKERS, seconds=seconds
        )._replace(case=name)
        for name, consistency, update in cases(_WORKERS)
        if name in ("BSP", "SSP(3)", "Downpour, Adagrad")
    ]
    goal = target(results, _STRAGGLERS)
    return {result.case: result.seconds_to(goal) for result in results}


def _claims(
    waiting: dict[int, float],
    seconds: dict[str, float | None],
    periods: dict[str, dict[int, float]],
) -> tuple[Claim, ...]:
    bsp, ssp, downpour = (
        seconds[case] or float("inf") for case in ("BSP", "SSP(3)", "Downpour, Adagrad")
    )
    longest = max(_PERIODS)
    elastic, pushed = (periods[name][longest] for name in ("EASGD", "Downpour"))
    shares = list(waiting.values())
    return (
        Claim(
            "waiting falls with every step of staleness",
            "less time on waiting (figure 2)",
            " > ".join(f"{share:.1%}" for share in shares),
            all(b < a for a, b in zip(shares, shares[1:], strict=False)),
        ),
        Claim(
            "SSP(3) is at the target before BSP",
            "faster than BSP",
            f"{ssp:.0f} against {bsp:.0f} simulated seconds",
            ssp < bsp,
        ),
        Claim(
            "Downpour with Adagrad is at the target before BSP",
            "best time to a fixed accuracy",
            f"{downpour:.0f} against {bsp:.0f} simulated seconds",
            downpour < bsp,
        ),
        Claim(
            f"elastic averaging tolerates long periods (tau={longest})",
            "better than Downpour from tau=16 (figure 4)",
            f"loss {elastic:.3f} against Downpour's {pushed:.3f}",
            elastic < pushed,
        ),
    )


def _run(setting: Setting) -> Result:
    seconds = 20.0 if setting.quick else 60.0
    setting.progress("waiting", 0.0)
    waiting = _waiting(setting, seconds)
    setting.progress("time to a loss", 0.4)
    times = _seconds_to_target(seconds)
    setting.progress("periods", 0.6)
    steps = 128 if setting.quick else 512
    periods = losses_by_period(_PERIODS, steps, _WORKERS, setting.seeds[0])
    shares = {s: float(np.mean(found)) for s, found in waiting.items()}
    rows = [(f"SSP({s}): waiting", f"{share:.1%}") for s, share in shares.items()]
    for case, found in times.items():
        rows.append((f"{case}: seconds to the target", f"{found or float('nan'):.1f}"))
    for name, by_period in periods.items():
        losses = (f"{loss:.3f} (tau={tau})" for tau, loss in by_period.items())
        rows.append((f"{name}: loss", ", ".join(losses)))

    def draw(figure: matplotlib.figure.Figure) -> None:
        left, right = figure.subplots(1, 2)
        errors = [100 * float(np.std(found)) for found in waiting.values()]
        heights = [100 * share for share in shares.values()]
        left.errorbar(list(shares), heights, errors, fmt="o-")
        left.set(xlabel="staleness s", ylabel="time spent waiting, %", ylim=0)
        for name, by_period in periods.items():
            right.plot(list(by_period), list(by_period.values()), "o-", label=name)
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
        _claims(shares, times, periods),
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
