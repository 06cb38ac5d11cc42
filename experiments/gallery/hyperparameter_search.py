"""Grid and random search: many trials in one program, without any collective."""

import functools
from typing import Any

import jax
import matplotlib.figure
import numpy as np
import optax
from flax import nnx

import meshpar
from experiments.gallery.paper import Claim, Paper, Result, Setting
from meshpar.methods.random_search import island_trials, trials

RANGES = {"rate": (1e-4, 3e-1), "decay": (1e-6, 1e-1), "epsilon": (1e-10, 1e-5)}
"""Ranges of Adam's learning rate, weight decay and epsilon; the first matters most."""

SIDES = (2, 4)
"""Values of each hyperparameter in the two grids."""

TRAINED, HELD_OUT, HIDDEN, BATCH = 1024, 512, 32, 64
COUNTS = (1, 2, 4, 8, 16, 32, 64)


class Classifier(nnx.Module):
    """A multilayer perceptron for digits of 8 x 8 pixels."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(64, HIDDEN, rngs=rngs)
        self.head = nnx.Linear(HIDDEN, 10, rngs=rngs)

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.hidden(x_BD)))


def _loss(model: Classifier, batch: dict[str, Any]) -> Any:
    logits = model(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean()


def _optimizer(values: trials.Values) -> optax.GradientTransformation:
    return optax.adamw(
        values["rate"], weight_decay=values["decay"], eps=values["epsilon"]
    )


@functools.cache
def _digits() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Training and held-out digits of scikit-learn."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))
    x, y = (pixels[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    parts = slice(0, TRAINED), slice(TRAINED, TRAINED + HELD_OUT)
    return tuple({"x": x[part], "y": y[part]} for part in parts)


def _batches(steps: int, seed: int) -> list[dict[str, np.ndarray]]:
    data, rng = _digits()[0], np.random.default_rng(seed)
    rows = rng.integers(0, TRAINED, (steps, BATCH))
    return [{name: x[chosen] for name, x in data.items()} for chosen in rows]


def _model() -> meshpar.Model:
    return meshpar.from_nnx(Classifier, _loss)


def grid_values(side: int) -> trials.Values:
    """The grid with so many values of each hyperparameter, in the middle of cells."""
    middles = (np.arange(side) + 0.5) / side
    return trials.grid(
        **{name: low * (high / low) ** middles for name, (low, high) in RANGES.items()}
    )


def _all_values(random_seed: int) -> tuple[dict[str, slice], trials.Values]:
    """{part: its trials} and the values of both grids and of random search, in one."""
    parts = {f"grid of {side ** len(RANGES)}": grid_values(side) for side in SIDES}
    parts["random"] = trials.random(COUNTS[-1], random_seed, **RANGES)
    ends = np.cumsum([len(values["rate"]) for values in parts.values()]).tolist()
    slices = map(slice, [0, *ends], ends)
    values = {
        name: np.concatenate([v[name] for v in parts.values()]) for name in RANGES
    }
    return dict(zip(parts, slices, strict=True)), values


def search(found: trials.Trials, steps: int, seed: int) -> np.ndarray:
    """Held-out losses [trials] after training; one that is no number is infinite."""
    state = found.init(seed)
    for batch in _batches(steps, seed):
        state, _ = found.step(state, batch)
    losses = np.asarray(found.evaluate(state, _digits()[1]))
    return np.where(np.isnan(losses), np.inf, losses)


def expected_best(losses: np.ndarray, count: int) -> float:
    """The mean of the lowest of `count` losses, over all sets of so many trials."""
    ordered = np.sort(losses)
    ranks = np.arange(len(ordered))
    # The probability that the best of a set has at least this rank.
    left = np.ones(len(ordered) + 1)
    for i in range(count):
        left *= np.maximum(len(ordered) - np.arange(len(ordered) + 1) - i, 0)
        left /= len(ordered) - i
    shares = left[ranks] - left[ranks + 1]
    return float(ordered[shares > 0] @ shares[shares > 0])


def _alone(
    batches: list[dict[str, np.ndarray]], values: dict[str, float]
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Trains one trial by itself; returns (losses by step, weights)."""
    devices = jax.devices()[:1]
    program = meshpar.lower(
        _model(), _optimizer(values), "data=1", batches[0], devices=devices
    )
    state, losses = program.init(0), []
    for batch in batches:
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(state.params)


def equality_claims(runs: int, steps: int = 5) -> list[Claim]:
    """Claims that trials equal separate runs, and about the program's collectives."""
    rates = np.geomspace(1e-3, 1e-1, 8)
    values = trials.grid(rate=rates, decay=[1e-3], epsilon=[1e-6])
    batches = _batches(steps, 0)
    together = trials.Trials(_model(), _optimizer, values, batches[0])
    state, losses = together.init(), []
    for batch in batches:
        state, loss = together.step(state, batch)
        losses.append(np.asarray(loss))
    own = {name: x[:runs].tolist() for name, x in values.items()}
    alone = island_trials.search(functools.partial(_alone, batches), own, workers=2)
    worst = 0.0
    for trial, (own_losses, params) in enumerate(alone):
        for step, loss in enumerate(own_losses):
            worst = max(worst, abs(losses[step][trial] / loss - 1))
        for path, x in params.items():
            difference = np.asarray(state.params[path][trial]) - x
            worst = max(worst, float(np.abs(difference).max()))
    found = together.collectives
    return [
        Claim(
            f"{runs} trials in one program equal {runs} islands, losses and weights",
            "",
            f"{worst:.1e} off after {steps} steps",
            worst < 1e-5,
        ),
        Claim(
            f"no collective in the program of {len(rates)} devices",
            "trials are independent",
            f"{len(found)}",
            not found,
        ),
    ]


def _draw(
    curve: np.ndarray, best: dict[int, list[float]], figure: matplotlib.figure.Figure
) -> None:
    """The best loss over the number of trials, random [seeds, counts] and grid."""
    axes = figure.subplots()
    axes.errorbar(
        COUNTS,
        curve.mean(axis=0),
        yerr=curve.std(axis=0),
        fmt="o-",
        capsize=3,
        label="random, expected best",
    )
    of_grids = [np.mean(x) for x in best.values()]
    spread = [np.std(x) for x in best.values()]
    style = dict(fmt="s", capsize=3, label="grid")
    axes.errorbar(list(best), of_grids, yerr=spread, **style)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.set(xlabel="trials", ylabel="best held-out loss, nats", yscale="log")
    axes.legend()


def _run(setting: Setting) -> Result:
    parts, values = _all_values(0)
    found = trials.Trials(_model(), _optimizer, values, _batches(1, 0)[0])
    losses = []
    for number, seed in enumerate(setting.seeds):
        setting.progress(
            f"{found.num_trials} trials", number / (len(setting.seeds) + 1)
        )
        losses.append(search(found, 60 if setting.quick else 200, seed))
    drawn = [x[parts["random"]] for x in losses]
    curve = np.array([[expected_best(x, k) for k in COUNTS] for x in drawn])
    best = {
        side ** len(RANGES): [
            float(x[parts[f"grid of {side ** len(RANGES)}"]].min()) for x in losses
        ]
        for side in SIDES
    }
    setting.progress("runs of their own", 0.9)
    claims = equality_claims(runs=2 if setting.quick else 8)
    large, goal = COUNTS[-1], float(np.mean(best[COUNTS[-1]]))
    means = curve.mean(axis=0)
    enough = [k for k, mean in zip(COUNTS, means, strict=True) if mean <= goal]
    claims.append(
        Claim(
            f"random trials that match the grid of {large} trials",
            "as good or better models in a fraction of the trials",
            f"{enough[0] if enough else 'more than ' + str(large)}, from one draw of "
            f"{large} trials",
            bool(enough) and enough[0] < large,
        )
    )

    rows = [
        (
            str(count),
            f"{means[i]:.4f}",
            f"{np.mean(best[count]):.4f}" if count in best else "",
        )
        for i, count in enumerate(COUNTS)
    ]
    return Result(
        ("trials", "random, expected best loss", "grid, best loss"),
        tuple(rows),
        tuple(claims),
        {"counts": COUNTS, "random": curve, "grid": best},
        functools.partial(_draw, curve, best),
    )


PAPER = Paper(
    name="hyperparameter_search",
    title="Grid and random search",
    source="Bergstra, Bengio, JMLR 2012, section 2",
    shows="best held-out loss against trials, grid and random, in one program",
    run=_run,
)
