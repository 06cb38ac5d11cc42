"""Gradient diversity: convergence against batch size for r-fold repeated data."""

import functools
from typing import Any

import matplotlib.figure
import numpy as np
import optax
from flax import nnx

import meshpar
from experiments.gallery.paper import Claim, Paper, Result, Setting
from meshpar.methods.gradient_diversity import Diversity, diversity_meter

ROWS, SAMPLES, RUNS = 1024, 512, 24
"""Rows of the data, rows that SGD draws in all, and runs of SGD per seed."""

FOLDS = (1, 4, 16, 64)
BATCHES = tuple(int(round(2 ** (k / 2))) for k in (0, *range(2, 17)))
RATES = 2.0 ** np.arange(-5, 3, 0.5)
_NEAR_BEST = 0.99


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's digits with a bias, and whether each is 5 or more, as -1 or 1."""
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))
    rows = np.concatenate([pixels / 16, np.ones((len(pixels), 1))], axis=1)
    return rows[order], np.where(digits[order] >= 5, 1.0, -1.0)


def repeated(fold: int, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """So many rows, of which every one stands `fold` times."""
    x, y = _digits()
    return tuple(np.tile(a[: rows // fold], (fold, 1)[: a.ndim]) for a in (x, y))


def gradients(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Gradients of the logistic losses, [..., rows, features].

    Args:
      weights: [..., features].
      x: [..., rows, features].
      y: [..., rows].
    """
    margins = y * (x @ weights[..., None])[..., 0]
    slopes = -y * (0.5 - 0.5 * np.tanh(margins / 2))  # The sigmoid of -margins.
    return slopes[..., None] * x


def _objective(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The mean loss of every run, [runs]."""
    return np.logaddexp(0, -y * (weights @ x.T)).mean(axis=1)


def diversity(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> Diversity:
    """The diversity of the data by brute force."""
    found = gradients(weights, x, y)
    total = found.sum(axis=0)
    return Diversity(len(x), float(np.square(found).sum()), float(total @ total))


def _descend(
    x: np.ndarray, y: np.ndarray, rate: float, batch: int, seed: int
) -> tuple[float, list[float]]:
    """(fall of the loss, bounds along the way) of SGD whose step sums over a batch."""
    rng = np.random.default_rng(seed)
    weights, bounds = np.zeros((RUNS, x.shape[1])), []
    for _ in range(SAMPLES // batch):
        if batch == 1:
            bounds.append(diversity(weights[0], x, y).batch_bound)
        drawn = rng.integers(0, len(x), (RUNS, batch))
        weights -= rate * gradients(weights, x[drawn], y[drawn]).sum(axis=1)
    return float(np.log(2) - _objective(weights, x, y).mean()), bounds


def convergence(fold: int, seed: int) -> dict[str, Any]:
    """SGD on r-fold repeated data with growing batches and equal numbers of rows.

    The learning rate per row is the smallest that is near the best for a batch of one
    row: few rows can be separated, and then no rate is too large.

    Returns:
      falls: fall of the loss with every batch size, over that with one row.
      knee: the batch with which half of that is left, between two sizes.
      advice: the harmonic mean of the bounds during the run with one row.
    """
    x, y = repeated(fold)
    falls = [_descend(x, y, rate, 1, seed + 100)[0] for rate in RATES]
    chosen = int(np.argmax(np.asarray(falls) >= _NEAR_BEST * max(falls)))
    rate = RATES[chosen]
    base, bounds = _descend(x, y, rate, 1, seed)
    shares = [_descend(x, y, rate, batch, seed)[0] / base for batch in BATCHES]
    return {
        "falls": shares,
        "inside": 0 < chosen < len(RATES) - 1,
        "knee": knee(shares),
        "advice": harmonic_mean(bounds),
    }


def knee(shares: list[float]) -> float:
    """The batch at which convergence first falls to one half, on a log scale."""
    last = next((i for i, share in enumerate(shares) if share < 0.5), None)
    if last is None:
        return float(BATCHES[-1])
    low, high = shares[last - 1], shares[last]
    part = (low - 0.5) / (low - max(high, -1.0))
    return float(BATCHES[last - 1] * (BATCHES[last] / BATCHES[last - 1]) ** part)


def harmonic_mean(values: list[float]) -> float:
    """The mean that counts small values most, as steps there cost most."""
    return float(1 / np.mean(1 / np.asarray(values)))


class Classifier(nnx.Module):
    """Logistic regression."""

    def __init__(self, num_features: int, rngs: nnx.Rngs):
        start = rngs.params.normal((num_features,)) / 8
        self.weights = nnx.Param(start)


def _make_classifier(rngs: nnx.Rngs) -> Classifier:
    return Classifier(_digits()[0].shape[1], rngs)


def _loss(model: Classifier, batch: dict[str, Any]) -> Any:
    margins = batch["y"] * (batch["x"] @ model.weights[...])
    return nnx.softplus(-margins).mean()


def meter_claims(rows: int = 64) -> list[Claim]:
    """Whether the metric beside a step equals brute force, and repetition is free."""
    bounds = {}
    for fold, size in ((1, rows // 4), (4, rows)):  # Equal rows, once and four times.
        x, y = repeated(fold, size)
        batch = {"x": x.astype(np.float32), "y": y.astype(np.float32)}
        model = meshpar.from_nnx(_make_classifier, _loss)
        program = meshpar.lower(model, optax.sgd(0.1), "data=8", batch)
        state = program.init()
        found = diversity_meter(program)(state, batch)
        weights = np.asarray(state.params["weights"], np.float64)
        bounds[fold] = found.batch_bound, diversity(weights, x, y).batch_bound
    error = max(abs(found / want - 1) for found, want in bounds.values())
    raised = bounds[4][0] / bounds[1][0] - 1
    return [
        Claim(
            "the metric on data=8 equals brute force",
            "",
            f"{error:.1e} off",
            error < 1e-4,
        ),
        Claim(
            "rows that stand four times do not raise the bound",
            "n times the diversity",
            f"{raised:+.1e}",
            abs(raised) < 1e-4,
        ),
    ]


def _draw(
    found: dict[int, list[dict[str, Any]]],
    means: dict[int, dict[str, float]],
    figure: matplotlib.figure.Figure,
) -> None:
    """Convergence over batch sizes, one curve per number of repetitions."""
    axes = figure.subplots()
    for number, (fold, runs) in enumerate(found.items()):
        shares = np.array([run["falls"] for run in runs])
        color, label = (
            f"C{number}",
            f"{fold}-fold, advice {means[fold]['advice']:.0f}",
        )
        axes.errorbar(
            BATCHES,
            shares.mean(axis=0),
            yerr=shares.std(axis=0),
            fmt="o-",
            color=color,
            capsize=2,
            label=label,
        )
        axes.axvline(means[fold]["advice"], color=color, linestyle=":")
    axes.axhline(0.5, color="#bbbbbb", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.set(
        ylim=(-0.5, 1.15),
        xlim=(0.9, 64),
        xlabel="batch size",
        ylabel=f"fall of the loss after {SAMPLES} rows, of that with 1 row",
    )
    axes.legend(title="rows repeated (dotted: the advice)", fontsize=8)


def _run(setting: Setting) -> Result:
    found: dict[int, list[dict[str, Any]]] = {}
    for number, fold in enumerate(FOLDS):
        setting.progress(f"rows repeated {fold} times", number / len(FOLDS))
        found[fold] = [convergence(fold, seed) for seed in setting.seeds]
    setting.progress("the metric beside a step", 0.95)
    claims = meter_claims()
    means = {
        fold: {
            key: float(np.mean([run[key] for run in runs]))
            for key in ("knee", "advice")
        }
        for fold, runs in found.items()
    }
    for fold, mean in means.items():
        ratio = mean["advice"] / mean["knee"]
        claims.append(
            Claim(
                f"rows repeated {fold} times: advice within 2x of the measured knee",
                "B up to n times the diversity",
                f"advice {mean['advice']:.1f}, knee {mean['knee']:.1f}",
                0.5 <= ratio <= 2,
            )
        )

    runs = [run for of_fold in found.values() for run in of_fold]
    claims.append(
        Claim(
            f"the smallest rate within {1 - _NEAR_BEST:.0%} of the best is neither the "
            "first nor the last that was tried",
            "",
            f"in {sum(run['inside'] for run in runs)} of {len(runs)} runs",
            all(run["inside"] for run in runs),
        )
    )
    rows = [
        (str(fold), f"{mean['advice']:.1f}", f"{mean['knee']:.1f}")
        for fold, mean in means.items()
    ]
    return Result(
        ("rows repeated", "advice: batch size at most", "measured knee"),
        tuple(rows),
        tuple(claims),
        {"batches": BATCHES, "means": means, "runs": found},
        functools.partial(_draw, found, means),
    )


PAPER = Paper(
    name="gradient_diversity",
    title="Gradient diversity",
    source="Yin et al., AISTATS 2018, arXiv:1706.05699, sections 3 and 6",
    shows="convergence against batch size for r-fold repeated data",
    run=_run,
)
