"""Raina et al. 2009: features without labels, learned by models that layouts shard."""

import math
from typing import NamedTuple

import jax
import matplotlib.figure
import numpy as np

import meshpar
from experiments.gallery import digits
from experiments.gallery import unsupervised_models as models
from experiments.gallery.linear_classifiers import (
    CLASSIFIERS,
    LOGISTIC,
    RIDGE,
    Accuracies,
    accuracy,
    bars,
)
from experiments.gallery.paper import Claim, Paper, Result, Setting

_HIDDEN, _HIDDEN_MNIST, _ROWS = 128, 512, 64
_PENALTY = 0.2
_ONE, _SHARDED = "data=1", "data=2,fsdp=2,tensor=2"
_DEVICES = 8
_COMPARED_STEPS, _FLOOR = 100, 1e-2
_LABELLED = 1500
_SHIFTS = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0))
"""No shift and one pixel in each direction: single pixels then say little."""

PIXELS, MACHINE, NETWORK = "pixels", "RBM", "DBN, two RBMs"
RANDOM, CODES = "codes of random bases", "sparse coding"
_LIFTS = {RIDGE: 0.05, LOGISTIC: 0.0}
"""Least gain in accuracy over pixels; logistic regression does better on these."""

_LEARNING_RATES = {MACHINE: 0.3, NETWORK: 0.3, CODES: 1.0}


def shifted(data: digits.Digits) -> digits.Digits:
    """Digits and their copies moved by one pixel, with zeros at the border."""
    side = math.isqrt(data.x.shape[1])
    pictures = np.pad(data.x.reshape(-1, side, side), ((0, 0), (1, 1), (1, 1)))
    moved = [
        pictures[:, 1 + down : 1 + down + side, 1 + right : 1 + right + side]
        for down, right in _SHIFTS
    ]
    x = np.concatenate(moved).reshape(-1, side**2)
    return digits.Digits(x, np.tile(data.y, len(_SHIFTS)))


def _model(kind: str, visible: int, hidden: int = _HIDDEN) -> meshpar.Model:
    if kind == CODES:
        return models.sparse_coder(visible, hidden, _PENALTY)
    return models.boltzmann(visible, hidden)


def _lower(
    kind: str, layout: str, visible: int, hidden: int = _HIDDEN
) -> meshpar.TrainProgram:
    model, rate = _model(kind, visible, hidden), _LEARNING_RATES[kind]
    return models.lower(model, layout, _ROWS, visible, rate)


def sharded_error(kind: str, x: np.ndarray) -> float:
    """Largest relative error of a parameter after some steps on 8 devices.

    In float64: rounding in float32 grows with the steps, to 6e-6 after 100. As in
    `meshpar.explain.verify`, a tensor that is small beside the others is measured
    beside them: biases begin at 0 and are rounding at first.
    """
    with jax.enable_x64(True):
        x = x.astype(np.float64)
        alone, spread = (
            models.train(_lower(kind, at, digits.PIXELS), x, _COMPARED_STEPS, _ROWS, 0)
            for at in (_ONE, _SHARDED)
        )
    norms = {path: float(np.linalg.norm(value)) for path, value in alone.items()}
    floor = _FLOOR * float(np.linalg.norm(list(norms.values())))
    return max(
        float(np.linalg.norm(spread[path] - value)) / max(norms[path], floor)
        for path, value in alone.items()
    )


def step_flops(hidden: int) -> tuple[float, float]:
    """FLOPs of a device in a step of CD-1 on one device, and on 8."""
    one, spread = (
        float(
            _lower(MACHINE, layout, digits.PIXELS, hidden).compiled.cost_analysis()[
                "flops"
            ]
        )
        for layout in (_ONE, _SHARDED)
    )
    return one, spread


def codes_excess(x: np.ndarray) -> float:
    """The objective of our codes over that of scikit-learn's, minus 1."""
    from sklearn.decomposition import sparse_encode

    coder = models.sparse_coder(x.shape[1], 24, _PENALTY)
    module = coder.bind(coder.init(jax.random.key(1)))
    bases = np.asarray(module.bases(), float)
    theirs = sparse_encode(
        x.astype(float), bases.T, algorithm="lasso_cd", alpha=_PENALTY, max_iter=5000
    )

    def objective(codes: np.ndarray) -> float:
        errors = np.square(x - codes @ bases.T).sum() / 2
        return float(errors + _PENALTY * np.abs(codes).sum())

    return objective(np.asarray(module.codes(x), float)) / objective(theirs) - 1


def divergence_error(x: np.ndarray, hidden: int = 24) -> float:
    """Largest error of the gradients of CD-1 against their formulas in numpy.

    The gradient of W is -(v0' p(h | v0) - v1' p(h | v1)) / B, with v1 the chances of
    the visible units given the hidden ones. Without noise these are their chances.
    """
    draws = np.random.default_rng(0)
    w = draws.normal(size=(x.shape[1], hidden)) * 0.1
    b, c = draws.normal(size=x.shape[1]), draws.normal(size=hidden)
    params = {"weight": w, "visible": b, "hidden": c}
    params = {path: np.float32(value) for path, value in params.items()}
    machine = models.boltzmann(x.shape[1], hidden)
    loss = lambda p: machine.evaluation_loss(p, {"x": x}).loss  # noqa: E731
    found = jax.grad(loss)(params)

    def chances(scores: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-scores))

    h0 = chances(x @ w + c)
    v1 = chances(h0 @ w.T + b)
    h1, rows = chances(v1 @ w + c), len(x)
    wanted = {
        "weight": -(x.T @ h0 - v1.T @ h1) / rows,
        "hidden": -(h0 - h1).mean(0),
        "visible": -(x - v1).mean(0),
    }
    return max(
        float(np.abs(np.asarray(found[path]) - value).max() / np.abs(value).max())
        for path, value in wanted.items()
    )


def reference_claims() -> tuple[Claim, ...]:
    """Whether CD-1 and the codes are those of their definitions."""
    x = digits.load()[0].x[:64]
    error, excess = divergence_error(x), codes_excess(x)
    return (
        Claim(
            "the gradients of CD-1 are those of its formulas, to 1e-4",
            "v0' p(h|v0) - v1' p(h|v1) (section 4)",
            f"{error:.1e} off",
            error < 1e-4,
        ),
        Claim(
            "the objective of the codes is within 1% of scikit-learn's",
            "L1-penalized least squares (section 5)",
            f"{excess:+.1e}",
            abs(excess) < 0.01,
        ),
    )


class Learned(NamedTuple):
    """Features of labelled and held-out digits by kind, and bases as pictures.

    Attributes:
      labelled: {kind: features with classes}.
      held_out: {kind: features with classes}.
      bases: {kind: [pixels, units]}.
    """

    labelled: dict[str, digits.Digits]
    held_out: dict[str, digits.Digits]
    bases: dict[str, np.ndarray]


def _signed(codes: np.ndarray) -> np.ndarray:
    """Concatenates the positive and the negative parts of codes."""
    return np.concatenate([np.maximum(codes, 0), np.maximum(-codes, 0)], axis=1)


def learn(
    x: np.ndarray,
    labelled: digits.Digits,
    held_out: digits.Digits,
    hidden: int,
    steps: int,
    seed: int,
) -> Learned:
    """Trains all kinds on x without labels; the network on the machine's features."""
    pixels = x.shape[1]
    machine = _lower(MACHINE, _ONE, pixels, hidden)
    params = models.train(machine, x, steps, _ROWS, seed)
    ups = models.features(machine, params, x)
    network = _lower(NETWORK, _ONE, hidden, hidden)
    above = models.train(network, ups, steps, _ROWS, seed)
    coder = _lower(CODES, _ONE, pixels, hidden)
    random, bases = (models.train(coder, x, n, _ROWS, seed) for n in (0, steps))

    def features(of: digits.Digits) -> dict[str, digits.Digits]:
        up = models.features(machine, params, of.x)
        found = {
            PIXELS: of.x,
            MACHINE: up,
            NETWORK: models.features(network, above, up),
            RANDOM: _signed(models.features(coder, random, of.x)),
            CODES: _signed(models.features(coder, bases, of.x)),
        }
        return {kind: of._replace(x=rows) for kind, rows in found.items()}

    weights = {MACHINE: params["weight"], CODES: bases["weight"]}
    return Learned(features(labelled), features(held_out), weights)


def _accuracies(learned: list[Learned], groups: np.ndarray) -> Accuracies:
    """Accuracies of all classifiers and kinds of features, by seed."""
    return {
        name: {
            kind: [
                accuracy(name, of.labelled[kind], groups, of.held_out[kind])
                for of in learned
            ]
            for kind in learned[0].labelled
        }
        for name in CLASSIFIERS
    }


def claims_of(
    errors: dict[str, float],
    accuracies: Accuracies,
    flops: dict[int, tuple[float, float]],
) -> tuple[Claim, ...]:
    """Whether layouts train the same features, and features help.

    Args:
      errors: {kind: largest relative error of a parameter on 8 devices}.
      accuracies: of the linear classifiers.
      flops: {hidden units: FLOPs of a device on one device, and on 8}.
    """
    equal = [
        Claim(
            f"{kind}: {_SHARDED} equals one device to 1e-9, in float64",
            "",
            f"{error:.1e} after {_COMPARED_STEPS} steps",
            error < 1e-9,
        )
        for kind, error in errors.items()
    ]
    means = {
        name: {kind: float(np.mean(x)) for kind, x in by_kind.items()}
        for name, by_kind in accuracies.items()
    }
    better = [
        Claim(
            f"{kind} lifts {name}{_points(_LIFTS[name])}",
            "features from unlabelled data help",
            f"{mean[kind]:.1%} against {mean[PIXELS]:.1%} of pixels",
            mean[kind] > mean[PIXELS] + _LIFTS[name],
        )
        for name, mean in means.items()
        for kind in (MACHINE, NETWORK, CODES)
    ]
    codes, others = means[RIDGE][CODES], means[RIDGE][RANDOM]
    learned = Claim(
        "learned bases do better than random ones",
        "",
        f"{codes:.1%} against {others:.1%}",
        codes > others + 0.01,
    )
    one, spread = flops[max(flops)]
    share = Claim(
        f"a device of {_DEVICES} does an eighth of the work of large machines",
        "up to 70 times faster than a CPU for large models (abstract)",
        f"{one / spread:.2f} times fewer FLOPs as compiled",
        one / spread > 0.9 * _DEVICES,
    )
    return (*equal, *better, learned, share)


def _run(setting: Setting) -> Result:
    # Pictures of 28 x 28 pixels show what was learned; small ones are quick.
    load, hidden = (
        (digits.load, _HIDDEN) if setting.quick else (digits.load_mnist, _HIDDEN_MNIST)
    )
    training, held_out = map(shifted, load())
    small = digits.load()[0].x
    chosen = np.random.default_rng(0).permutation(len(training.y))[:_LABELLED]
    labelled = digits.Digits(training.x[chosen], training.y[chosen])
    errors, learned = {}, []
    for index, kind in enumerate((MACHINE, CODES)):
        setting.progress(f"{kind} on 8 devices", index / 10)
        errors[kind] = sharded_error(kind, small)
    steps = 400 if setting.quick else 800
    for index, seed in enumerate(setting.seeds):
        setting.progress(f"features, seed {seed}", 0.2 + index / 5)
        learned.append(learn(training.x, labelled, held_out, hidden, steps, seed))
    setting.progress("linear classifiers", 0.8)
    pictures = chosen % (len(training.y) // len(_SHIFTS))
    accuracies = _accuracies(learned, pictures)
    setting.progress("work of a device", 0.9)
    sizes = (1024,) if setting.quick else (256, 1024)
    flops = {size: step_flops(size) for size in sizes}
    rows = [
        (f"{kind}, {name}", f"{np.mean(x):.1%}", f"{np.std(x):.1%}")
        for name, by_kind in accuracies.items()
        for kind, x in by_kind.items()
    ]
    for size, (one, eighth) in flops.items():
        work = f"{one / 1e6:.1f} MFLOPs alone", f"{eighth / 1e6:.1f} each of 8"
        rows.append((f"CD-1, {digits.PIXELS * size:,} weights", *work))

    def draw(figure: matplotlib.figure.Figure) -> None:
        left, middle, right = figure.subplots(1, 3, width_ratios=(4, 3, 3))
        bars(left, accuracies)
        for axes, (kind, weight) in zip(
            (middle, right), learned[-1].bases.items(), strict=True
        ):
            axes.imshow(_mosaic(weight), cmap="gray")
            axes.set_title(f"features, {kind}", fontsize=9)
            axes.axis("off")

    return Result(
        ("features", "accuracy", "deviation over seeds"),
        tuple(rows),
        (*reference_claims(), *claims_of(errors, accuracies, flops)),
        {"accuracy": accuracies, "errors": errors, "flops": flops},
        draw,
    )


def _points(lift: float) -> str:
    """A least gain in words; "" if there is none."""
    return f" by {100 * lift:.0f} points" if lift else ""


def _mosaic(weight_VH: np.ndarray, across: int = 5) -> np.ndarray:
    """The strongest units as pictures with the same contrast, in a square."""
    strongest = np.argsort(-np.square(weight_VH).sum(0))[: across**2]
    side = math.isqrt(len(weight_VH))
    pictures = weight_VH[:, strongest].T.reshape(-1, side, side)
    pictures = pictures / np.abs(pictures).max((1, 2), keepdims=True)
    framed = np.pad(pictures, ((0, 0), (0, 1), (0, 1)), constant_values=-1)
    side += 1
    grid = framed.reshape(across, across, side, side).swapaxes(1, 2)
    return grid.reshape(across * side, across * side)


PAPER = Paper(
    name="unsupervised",
    title="Unsupervised learning of features, sharded",
    source="Raina, Madhavan and Ng, ICML 2009, sections 4 and 5",
    shows="features of RBM, DBN and sparse coding, and what they add to a linear "
    "classifier of digits",
    run=_run,
)
