"""Speedup over devices with its fitted laws, as a table and a picture."""

from collections.abc import Mapping

import matplotlib.axes
import numpy as np
import rich.table

from meshpar.methods import speedup_laws

COLORS = {"amdahl": "#c44e52", "gunther": "#2a6fbb", "gustafson": "#2a6fbb"}


def laws(
    times: Mapping[int, float], weak: bool
) -> dict[str, speedup_laws.Strong | speedup_laws.Weak]:
    """{name: law fitted to the times}; Gunther's needs three numbers of devices.

    Args:
      times: {devices: seconds per step}.
      weak: whether the work grows with the devices.

    Raises:
      MeshparError: too few times, or times that cannot be.
    """
    if weak:
        return {"gustafson": speedup_laws.fit_gustafson(times)}
    fits = {"amdahl": speedup_laws.fit_amdahl(times)}
    if len(times) >= 3:
        fits["gunther"] = speedup_laws.fit_gunther(times)
    return fits


def describe(law: speedup_laws.Strong | speedup_laws.Weak) -> str:
    """The shares of a law and what follows from them, in one line."""
    if isinstance(law, speedup_laws.Weak):
        return f"serial share {law.serial:.4g}"
    text = f"sigma {law.sigma:.4g}"
    if law.kappa:
        text += f", kappa {law.kappa:.3g}, fastest with N* = {law.best_devices:.0f}"
    return f"{text}, speedup at most {law.limit:.4g}"


def table(
    times: Mapping[int, float],
    fits: Mapping[str, speedup_laws.Strong | speedup_laws.Weak],
) -> rich.table.Table:
    """One row per number of devices: seconds, speedup, and the speedup of each law."""
    result = rich.table.Table("devices", "seconds per step", "speedup", *fits)
    for n, number in measured(times, fits).items():
        by_law = (f"{law.speedup(n):.2f}" for law in fits.values())
        result.add_row(str(n), f"{times[n]:.4g}", f"{number:.2f}", *by_law)
    return result


def measured(
    times: Mapping[int, float],
    fits: Mapping[str, speedup_laws.Strong | speedup_laws.Weak],
) -> dict[int, float]:
    """{devices: speedup} over the time of one device, of the last law if not given."""
    law = list(fits.values())[-1]
    first = times.get(1, law.one_device)
    weak = isinstance(law, speedup_laws.Weak)
    return {n: first / times[n] * (n if weak else 1) for n in sorted(times)}


def plot(
    axes: matplotlib.axes.Axes,
    times: Mapping[int, float],
    fits: Mapping[str, speedup_laws.Strong | speedup_laws.Weak],
    label: str,
) -> None:
    """Draws the speedup, its laws, and the ideal."""
    most = max(times)
    dense = np.geomspace(1, most * 1.5, 200)
    axes.plot(dense, dense, ":", color="#999999", label="ideal")
    for name, law in fits.items():
        curve = [law.speedup(n) for n in dense]
        axes.plot(dense, curve, color=COLORS[name], label=f"{name.capitalize()}'s fit")
    points = measured(times, fits)
    axes.plot(points.keys(), points.values(), "o", color="#222222", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.set(xlabel="devices", ylabel="speedup")
    axes.legend(fontsize=8)
