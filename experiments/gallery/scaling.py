"""Amdahl's, Gunther's and Gustafson's laws: planted shares, and predicted steps."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import matplotlib.figure
import numpy as np

from experiments import recipes
from experiments.gallery.paper import Claim, Paper, Result, Setting
from experiments.recipes import step_times
from experiments.reports import scaling
from meshpar.layouts.axes import DATA
from meshpar.methods import speedup_laws
from meshpar.runs.config import with_settings

PLANTED = speedup_laws.Strong(one_device=2.0, sigma=0.02, kappa=0.0002)
PLANTED_WEAK = speedup_laws.Weak(one_device=2.0, serial=0.05)
DEVICES = (1, 2, 4, 8, 16, 32, 64, 128)
_NOISE, _DRAWS = 0.0005, range(200)
"""Standard deviation of the relative noise of planted times, and seeds of the noise."""

_TOPOLOGIES = ("v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8")
_SETTINGS = ("model.vocab=256", "model.depth=2")
_ROWS, _ROWS_OF_ONE = 64, 4
"""Sequences of a step: of the whole step, and of one device if the work grows."""


def planted_times(
    law: speedup_laws.Strong | speedup_laws.Weak, seed: int, noise: float = _NOISE
) -> dict[int, float]:
    """{devices: seconds} of a law, with noise that is drawn from a seed."""
    rng = np.random.default_rng(seed)
    return {n: written_out(law, n) * (1 + noise * rng.normal()) for n in DEVICES}


def written_out(law: speedup_laws.Strong | speedup_laws.Weak, n: int) -> float:
    """Seconds of a law as the sum of its parts, without the library's formulas.

    Strong: a serial part, a part that the devices share, and one round with each of the
    other devices. Weak: of the time on n devices the share `serial` does the work of
    one device, and the rest that of n devices.
    """
    if isinstance(law, speedup_laws.Weak):
        done_per_second = (law.serial * 1 + (1 - law.serial) * n) / law.one_device
        return n / done_per_second
    shared = (1 - law.sigma) / n
    return law.one_device * (law.sigma + shared + law.kappa * (n - 1))


def _worst(
    seeds: Sequence[int], found: Callable[[int], float], planted: float
) -> float:
    """The largest relative error of a fitted number over the seeds."""
    return max(abs(found(seed) / planted - 1) for seed in seeds)


def recovery_claims(seeds: Sequence[int] = _DRAWS) -> list[Claim]:
    """Whether the fits find what was planted, and the laws' own arithmetic."""
    fits = {
        seed: speedup_laws.fit_gunther(planted_times(PLANTED, seed)) for seed in seeds
    }
    weak = {
        seed: speedup_laws.fit_gustafson(planted_times(PLANTED_WEAK, seed))
        for seed in seeds
    }
    coherency = _worst(seeds, lambda s: fits[s].kappa, PLANTED.kappa)
    errors = {
        "serial share sigma": (
            _worst(seeds, lambda s: fits[s].sigma, PLANTED.sigma),
            0.01,
        ),
        "coherency kappa": (coherency, 0.01),
        "serial share of weak scaling": (
            _worst(seeds, lambda s: weak[s].serial, PLANTED_WEAK.serial),
            0.03,
        ),
    }
    claims = [
        Claim(
            f"planted {name} is recovered to {most:.0%} in {len(seeds)} draws with "
            f"{_NOISE:.2%} of noise",
            "",
            f"at most {error:.2%} off",
            error < most,
        )
        for name, (error, most) in errors.items()
    ]
    return claims + _arithmetic_claims()


def _arithmetic_claims() -> list[Claim]:
    """Whether the laws' own formulas are right."""
    claims = []
    best = min(range(1, 10_000), key=lambda n: written_out(PLANTED, n))
    off = max(
        abs(law.seconds(n) / written_out(law, n) - 1)
        for law in (PLANTED, PLANTED_WEAK)
        for n in DEVICES
    )
    claims.append(
        Claim(
            "the laws are the sums of their serial, shared and pairwise parts",
            "",
            f"{off:.1e} off",
            off < 1e-12,
        )
    )
    claims.append(
        Claim(
            "the fastest number of devices, by trying all",
            f"N* = sqrt((1 - sigma) / kappa) = {PLANTED.best_devices:.1f}",
            f"{best}",
            abs(best - PLANTED.best_devices) <= 1,
        )
    )
    times = {n: written_out(speedup_laws.Strong(1.0, 0.01), n) for n in DEVICES}
    amdahl = speedup_laws.fit_amdahl(times)
    half = min(range(1, 1000), key=lambda n: abs(amdahl.speedup(n) - amdahl.limit / 2))
    claims.append(
        Claim(
            "Amdahl's limit and half of it, 99% parallel",
            "100x, 99 devices",
            f"{amdahl.limit:.1f}x, {half} devices",
            math.isclose(amdahl.limit, 100, rel_tol=1e-6) and half == 99,
        )
    )
    return claims


def _predicted(setting: Setting) -> tuple[dict[int, float], dict[int, float]]:
    """{chips: predicted seconds} of one step on more chips, and of a growing step."""
    config = with_settings(recipes.get("bytes-llama"), _SETTINGS)
    strong, weak = {}, {}
    for number, topology in enumerate(_TOPOLOGIES):
        for grows, times in ((False, strong), (True, weak)):
            n = 4 * 2**number
            rows = _ROWS_OF_ONE * n if grows else _ROWS
            setting.progress(
                f"compiles for {topology}, {rows} sequences",
                (2 * number + grows) / (2 * len(_TOPOLOGIES)),
            )
            if grows and rows == _ROWS:  # The same program.
                times[n] = strong[n]
                continue
            sized = dataclasses.replace(config, batch_size=rows)
            _, times[n] = step_times.seconds_per_step(sized, DATA, topology)
    return strong, weak


def _predicted_claims(
    strong: dict[int, float], weak: dict[int, float]
) -> tuple[speedup_laws.Strong, speedup_laws.Weak, list[Claim]]:
    """The fits of predicted times, and what they must satisfy."""
    gunther, gustafson = (
        speedup_laws.fit_gunther(strong),
        speedup_laws.fit_gustafson(weak),
    )
    errors = [
        speedup_laws.largest_error(gunther, strong),
        speedup_laws.largest_error(gustafson, weak),
    ]
    first, last = min(strong), max(strong)
    shares = [
        strong[first] * first / (strong[last] * last),
        weak[first] / weak[last],
    ]
    claims = [
        Claim(
            "the laws fit predicted times to 5%",
            "",
            f"strong {errors[0]:.1%}, weak {errors[1]:.1%} off",
            max(errors) < 0.05,
        ),
        Claim(
            f"from {first} to {last} chips, work that grows keeps more efficiency",
            "Gustafson: speedup grows with the work",
            f"strong {shares[0]:.0%}, weak {shares[1]:.0%}",
            shares[1] > shares[0],
        ),
    ]
    return gunther, gustafson, claims


def _run(setting: Setting) -> Result:
    times = planted_times(PLANTED, setting.seeds[0])
    fits = scaling.laws(times, weak=False)
    panels = [("planted, with noise", times, fits)]
    claims = recovery_claims()
    numbers = {
        "planted": dataclasses.asdict(PLANTED),
        "times": times,
        "fits": {name: dataclasses.asdict(law) for name, law in fits.items()},
    }
    if not setting.quick:
        strong, weak = _predicted(setting)
        gunther, gustafson, more = _predicted_claims(strong, weak)
        claims += more
        panels.append(("predicted for v5e, one step", strong, {"gunther": gunther}))
        panels.append(("predicted for v5e, work grows", weak, {"gustafson": gustafson}))
        numbers["predicted"] = {
            "strong": strong,
            "weak": weak,
            "gunther": dataclasses.asdict(gunther),
            "gustafson": dataclasses.asdict(gustafson),
        }

    def draw(figure: matplotlib.figure.Figure) -> None:
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (title, times, fits) in zip(all_axes, panels, strict=True):
            scaling.plot(axes, times, fits, title.partition(",")[0])
            axes.set_title(title, fontsize=8)

    return Result(
        ("times", "devices", "seconds per step", "speedup", "by the law"),
        tuple(row for panel in panels for row in _rows(*panel)),
        tuple(claims),
        numbers,
        draw,
    )


def _rows(
    title: str,
    times: dict[int, float],
    fits: dict[str, speedup_laws.Strong | speedup_laws.Weak],
) -> list[tuple[str, ...]]:
    measured, law = scaling.measured(times, fits), list(fits.values())[-1]
    return [
        (
            title,
            str(n),
            f"{times[n]:.4g}",
            f"{measured[n]:.2f}",
            f"{law.speedup(n):.2f}",
        )
        for n in times
    ]


PAPER = Paper(
    name="scaling",
    title="Laws of speedup",
    source=(
        "Amdahl, AFIPS 1967; Gustafson, CACM 1988; Gunther, arXiv:0808.1431: "
        "the laws; no figure of theirs"
    ),
    shows="speedup over devices with the fits of Amdahl, Gunther and Gustafson",
    run=_run,
)
