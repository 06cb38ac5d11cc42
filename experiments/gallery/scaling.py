"""Amdahl's and Gunther's laws: planted shares are recovered from step times."""

import matplotlib.figure
import numpy as np

from experiments.gallery.paper import Claim, Paper, Result, Setting
from meshpar.explain import speedup

_PLANTED = speedup.Strong(one_device=2.0, sigma=0.02, kappa=0.0002)
_DEVICES = (1, 2, 4, 8, 16, 32, 64, 128)
_NOISE = 0.001
"""Standard deviation of the relative noise of the planted times."""


def _run(setting: Setting) -> Result:
    setting.progress("fits", 0.0)
    rng = np.random.default_rng(setting.seeds)
    times = {n: _PLANTED.seconds(n) * (1 + _NOISE * rng.normal()) for n in _DEVICES}
    amdahl, gunther = speedup.fit_amdahl(times), speedup.fit_gunther(times)
    rows = [
        (
            str(n),
            f"{times[n]:.4f}",
            f"{gunther.one_device / times[n]:.2f}",
            f"{amdahl.speedup(n):.2f}",
            f"{gunther.speedup(n):.2f}",
        )
        for n in _DEVICES
    ]
    errors = {
        "sigma": abs(gunther.sigma / _PLANTED.sigma - 1),
        "kappa": abs(gunther.kappa / _PLANTED.kappa - 1),
    }
    claims = [
        Claim(
            f"planted {name} is recovered to 1%", "", f"{error:.2%} off", error < 0.01
        )
        for name, error in errors.items()
    ]

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes, dense = figure.subplots(), np.linspace(1, max(_DEVICES), 200)
        axes.plot(dense, amdahl.speedup(dense), label="Amdahl's fit")
        axes.plot(dense, gunther.speedup(dense), label="Gunther's fit")
        measured = [gunther.one_device / times[n] for n in _DEVICES]
        axes.plot(_DEVICES, measured, "o", label="planted, with noise")
        axes.set(xlabel="devices", ylabel="speedup")
        axes.legend()

    return Result(
        ("devices", "seconds", "speedup", "Amdahl's fit", "Gunther's fit"),
        tuple(rows),
        tuple(claims),
        {"times": times, "sigma": gunther.sigma, "kappa": gunther.kappa},
        draw,
    )


PAPER = Paper(
    name="scaling",
    title="Speedup with more devices",
    source="Amdahl, AFIPS 1967; Gunther, arXiv:0808.1431",
    shows="speedup over devices, with the fits of Amdahl and Gunther",
    run=_run,
)
