"""Gradient coding: time per iteration with stragglers, and exact sums without them."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import scipy.sparse as sp

import meshpar
from experiments.convex import batch
from experiments.gallery.paper import Claim, Paper, Result, Setting
from meshpar.layouts.axes import DATA
from meshpar.methods.gradient_coding import codes
from meshpar.methods.gradient_coding.coded_sum import CodedSum

DEVICES = 8
CODES = ((codes.cyclic, 1), (codes.cyclic, 2), (codes.fractional_repetition, 1))
"""Codes whose every set of stragglers is tried on the devices."""

WORKERS, SLOWDOWN, L2 = 12, 8.0, 1.0
STRAGGLERS = (0, 1, 2, 3)
METHODS = {
    batch.NAIVE: "naive: waits for all",
    batch.IGNORE: "ignores stragglers",
    batch.CYCLIC: "cyclic code",
    batch.REPETITION: "fractional repetition",
}
_STYLES = {
    batch.NAIVE: ("s-", "#c44e52"),
    batch.IGNORE: ("^-", "#888888"),
    batch.CYCLIC: ("o-", "#2a6fbb"),
    batch.REPETITION: ("x--", "#4c9f70"),
}


def largest_error(
    make: Callable[[int, int], codes.Code], stragglers: int
) -> tuple[float, int]:
    """(largest error over all sets of stragglers, sets of one more that are decoded).

    The sums are computed on the devices, in float64 and relative to the exact sum.

    Args:
      make: of a code.
      stragglers: that it tolerates.
    """
    mesh = meshpar.mesh.make_mesh(meshpar.layouts.parse(f"{DATA}={DEVICES}"))
    rng = np.random.default_rng(0)
    parts = rng.normal(size=(DEVICES, 4, 16)), rng.normal(size=(DEVICES, 4))

    def gradient(weights: jax.Array, part: tuple) -> jax.Array:
        return jax.grad(lambda w: jnp.square(part[0] @ w - part[1]).sum())(weights)

    coded = CodedSum(make(DEVICES, stragglers), mesh, gradient)
    worst, decoded = 0.0, 0
    with jax.enable_x64(True):
        weights, placed = np.linspace(-1, 1, 16), coded.place(parts)
        gradients = jax.jit(jax.vmap(gradient, (None, 0)))(weights, parts)
        exact = np.asarray(gradients).sum(axis=0)
        step = jax.jit(coded.sum)
        for missing in itertools.combinations(range(DEVICES), stragglers):
            alive = [i for i in range(DEVICES) if i not in missing]
            found = np.asarray(step(weights, placed, coded.coefficients(alive)))
            difference = np.abs(found - exact).max() / np.abs(exact).max()
            worst = max(worst, float(difference))
    for missing in itertools.combinations(range(DEVICES), stragglers + 1):
        try:
            coded.coefficients([i for i in range(DEVICES) if i not in missing])
            decoded += 1
        except codes.StragglersError:
            pass
    return worst, decoded


def exactness_claims() -> list[Claim]:
    """Whether every set of s stragglers is exact, and which sets of s + 1 are not."""
    claims = []
    for make, s in CODES:
        error, decoded = largest_error(make, s)
        name = f"{make.__name__}, n={DEVICES}, s={s}"
        claims.append(
            Claim(
                f"{name}: exact for every set of s stragglers",
                "exact",
                f"largest error {error:.1e}",
                error < 1e-6,
            )
        )
        # Groups of repeated workers fail only together.
        groups = DEVICES // (s + 1) if make is codes.fractional_repetition else 0
        every = len(list(itertools.combinations(range(DEVICES), s + 1)))
        wanted = every - groups if groups else 0
        claims.append(
            Claim(
                f"{name}: sets of s + 1 stragglers that it decodes",
                "all but whole groups" if groups else "none",
                f"{decoded} of {every}",
                decoded == wanted,
            )
        )
    return claims


def _problem() -> batch.Problem:
    from sklearn.datasets import load_breast_cancer

    rows, labels = load_breast_cancer(return_X_y=True)
    rows = (rows - rows.mean(axis=0)) / rows.std(axis=0)
    order = np.random.default_rng(0).permutation(len(rows))  # Labels are sorted.
    return batch.Problem(sp.csr_array(rows[order]), 2.0 * labels[order] - 1, L2)


def _descents(
    setting: Setting, rounds: int
) -> dict[str, dict[int, list[batch.Descent]]]:
    """{method: {stragglers: a descent per seed}}."""
    problem, found = _problem(), {}
    for number, method in enumerate(METHODS):
        setting.progress(f"descends, {method}", number / len(METHODS))
        found[method] = {
            s: [
                batch.descend(problem, method, WORKERS, s, SLOWDOWN, rounds, seed)
                for seed in setting.seeds
            ]
            for s in STRAGGLERS
        }
    return found


def _distance(descent: batch.Descent, exact: batch.Descent) -> float:
    """The distance of two descents' weights, relative to those of the second."""
    difference = np.linalg.norm(descent.weights - exact.weights)
    return float(difference / np.linalg.norm(exact.weights))


def _time_claims(
    descents: dict[str, dict[int, list[batch.Descent]]], rounds: int
) -> list[Claim]:
    """Whether coded iterations take s + 1 units and are exact."""
    seconds = {
        method: {s: found[0].seconds / rounds for s, found in by_number.items()}
        for method, by_number in descents.items()
    }
    exact = descents[batch.NAIVE]

    def difference(method: str) -> float:
        return max(
            _distance(one, naive)
            for s in STRAGGLERS[1:]
            for one, naive in zip(descents[method][s], exact[s], strict=True)
        )

    claims = []
    for method in (batch.CYCLIC, batch.REPETITION):
        of = seconds[method]
        claims.append(
            Claim(
                f"{METHODS[method]}: s + 1 units per iteration, less than naive",
                "s + 1",
                ", ".join(f"{of[s]:g}" for s in STRAGGLERS),
                all(of[s] == s + 1 < seconds[batch.NAIVE][s] for s in STRAGGLERS[1:]),
            )
        )
        claims.append(
            Claim(
                f"{METHODS[method]}: the same weights as the naive scheme",
                "exact",
                f"{difference(method):.1e} off",
                difference(method) < 1e-6,
            )
        )
    off = min(
        _distance(d, naive)
        for s in STRAGGLERS[1:]
        for d, naive in zip(descents[batch.IGNORE][s], exact[s], strict=True)
    )
    claims.append(
        Claim(
            "ignoring stragglers leaves the path of the exact gradient",
            "approximate",
            f"weights at least {off:.1%} off",
            off > 1e-3,
        )
    )
    return claims


def _run(setting: Setting) -> Result:
    rounds = 30 if setting.quick else 100
    descents = _descents(setting, rounds)
    setting.progress("tries every set of stragglers", 0.9)
    claims = [*exactness_claims(), *_time_claims(descents, rounds)]
    times = {
        method: [descents[method][s][0].seconds / rounds for s in STRAGGLERS]
        for method in METHODS
    }
    distances = {
        method: [
            [
                _distance(one, naive)
                for one, naive in zip(found[s], descents[batch.NAIVE][s], strict=True)
            ]
            for s in STRAGGLERS
        ]
        for method, found in descents.items()
    }

    def draw(figure: matplotlib.figure.Figure) -> None:
        left, right = figure.subplots(1, 2)
        for method, label in METHODS.items():
            style, color = _STYLES[method]
            left.plot(STRAGGLERS, times[method], style, color=color, label=label)
            means = np.mean(distances[method], axis=1)
            right.errorbar(
                STRAGGLERS,
                means,
                yerr=np.std(distances[method], axis=1),
                fmt=style,
                color=color,
                capsize=3,
            )
        left.set(ylabel="time per iteration (simulated, 1 = a part)")
        right.set(ylabel=f"distance of the weights after {rounds} iterations")
        for axes in (left, right):
            axes.set(xlabel=f"stragglers of {WORKERS} workers", xticks=STRAGGLERS)
        left.legend(fontsize=8)

    rows = [
        (
            label,
            str(s),
            f"{times[method][i]:g}",
            f"{np.mean(distances[method][i]):.1e}",
        )
        for method, label in METHODS.items()
        for i, s in enumerate(STRAGGLERS)
    ]
    return Result(
        ("method", "stragglers", "time per iteration", "distance from naive"),
        tuple(rows),
        tuple(claims),
        {"stragglers": STRAGGLERS, "time": times, "distance": distances},
        draw,
    )


PAPER = Paper(
    name="gradient_coding",
    title="Gradient coding",
    source="Tandon, Lei, Dimakis, Karampatziakis, ICML 2017, arXiv:1612.03301, sec. 5",
    shows="time per iteration against stragglers: naive, ignoring, coded (simulated)",
    run=_run,
)
