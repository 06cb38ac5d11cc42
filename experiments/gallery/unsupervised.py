"""Raina et al. 2009: features without labels, learned by models that layouts shard."""

import math
from typing import NamedTuple

import jax
import matplotlib.figure
import numpy as np
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.model_selection import GridSearchCV, GroupKFold

import meshpar
from experiments.gallery import digits
from experiments.gallery import unsupervised_models as models
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
RIDGE, LOGISTIC = "ridge", "logistic regression"
CLASSIFIERS = {
    RIDGE: (RidgeClassifier(), {"alpha": [0.1, 1, 10, 100, 1000]}),
    LOGISTIC: (LogisticRegression(max_iter=2000), {"C": [0.003, 0.03, 0.3, 3]}),
}
"""{name: (linear classifier, penalties to choose from)}."""

_LIFTS = {RIDGE: 0.05, LOGISTIC: 0.0}
"""Least gain in accuracy over pixels; logistic regression does better on these."""

_PARTS = 5
"""Of the cross-validation."""

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


class Learned(NamedTuple):
    """Features of labelled and held-out digits by kind, and bases as pictures.

    Attributes:
      training: {kind: [rows, features]}.
      held_out: {kind: [rows, features]}.
      bases: {kind: [pixels, units]}.
    """

    training: dict[str, np.ndarray]
    held_out: dict[str, np.ndarray]
    bases: dict[str, np.ndarray]


def _signed(codes: np.ndarray) -> np.ndarray:
    """Positive and negative parts of codes beside each other."""
    return np.concatenate([np.maximum(codes, 0), np.maximum(-codes, 0)], axis=1)


def learn(
    x: np.ndarray,
    labelled: np.ndarray,
    held_out: np.ndarray,
    hidden: int,
    steps: int,
    seed: int,
) -> Learned:
    """Trains all kinds on x without labels; the network on the machine's features."""
    pixels = x.shape[1]
    program = _lower(MACHINE, _ONE, pixels, hidden)
    params = models.train(program, x, steps, _ROWS, seed)
    ups = [models.features(program, params, rows) for rows in (x, labelled, held_out)]
    bases = {MACHINE: params["weight"]}
    second = _lower(NETWORK, _ONE, hidden, hidden)
    above = models.train(second, ups[0], steps, _ROWS, seed)
    tops = [models.features(second, above, rows) for rows in ups[1:]]
    coder = _lower(CODES, _ONE, pixels, hidden)
    codes = []
    for trained_steps in (0, steps):
        learned = models.train(coder, x, trained_steps, _ROWS, seed)
        both = (models.features(coder, learned, rows) for rows in (labelled, held_out))
        codes.append([_signed(rows) for rows in both])
    bases[CODES] = learned["weight"]
    found = zip((labelled, held_out), ups[1:], tops, *codes, strict=True)
    kinds = PIXELS, MACHINE, NETWORK, RANDOM, CODES
    training, tested = (dict(zip(kinds, parts, strict=True)) for parts in found)
    return Learned(training, tested, bases)


def accuracies(
    name: str,
    learned: Learned,
    labels: np.ndarray,
    pictures: np.ndarray,
    held: np.ndarray,
) -> dict[str, float]:
    """{kind: share of held-out digits that a linear classifier gets right}.

    The penalty is chosen for each kind by cross-validation on the labelled digits.

    Args:
      name: of the classifier, in `CLASSIFIERS`.
      learned: the features.
      labels: classes of the labelled digits, [rows].
      pictures: number of the picture that each of them is a copy of, [rows]; copies
        of one picture are in the same part of the cross-validation.
      held: classes of the held-out digits.
    """
    found = {}
    for kind, x in learned.training.items():
        search = GridSearchCV(*CLASSIFIERS[name], cv=GroupKFold(_PARTS))
        search.fit(x, labels, groups=pictures)
        found[kind] = float(search.score(learned.held_out[kind], held))
    return found


def _claims(
    errors: dict[str, float],
    by_classifier: dict[str, dict[str, float]],
    flops: dict[int, tuple[float, float]],
) -> tuple[Claim, ...]:
    equal = [
        Claim(
            f"{kind}: {_SHARDED} equals one device to 1e-9, in float64",
            "",
            f"{error:.1e} after {_COMPARED_STEPS} steps",
            error < 1e-9,
        )
        for kind, error in errors.items()
    ]
    better = [
        Claim(
            f"{kind} lifts {name}" + f" by {_LIFTS[name]:.0%}" * bool(_LIFTS[name]),
            "features from unlabelled data help",
            f"{scores[kind]:.1%} against {scores[PIXELS]:.1%} of pixels",
            scores[kind] > scores[PIXELS] + _LIFTS[name],
        )
        for name, scores in by_classifier.items()
        for kind in (MACHINE, NETWORK, CODES)
    ]
    scores = by_classifier[RIDGE]
    learned = Claim(
        "learned bases do better than random ones",
        "",
        f"{scores[CODES]:.1%} against {scores[RANDOM]:.1%}",
        scores[CODES] > scores[RANDOM] + 0.01,
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
    labels = training.y[chosen]
    pictures = chosen % (len(training.y) // len(_SHIFTS))
    errors, by_seed = {}, []
    for index, kind in enumerate((MACHINE, CODES)):
        setting.progress(f"{kind} on 8 devices", index / 10)
        errors[kind] = sharded_error(kind, small)
    steps = 400 if setting.quick else 800
    for index, seed in enumerate(setting.seeds):
        setting.progress(f"features, seed {seed}", 0.2 + index / 5)
        labelled = training.x[chosen]
        learned = learn(training.x, labelled, held_out.x, hidden, steps, seed)
        by_seed.append(
            {
                name: accuracies(name, learned, labels, pictures, held_out.y)
                for name in CLASSIFIERS
            }
        )
    setting.progress("work of a device", 0.9)
    sizes = (1024,) if setting.quick else (256, 1024)
    flops = {size: step_flops(size) for size in sizes}
    kinds = list(by_seed[0][RIDGE])
    values = {
        name: {kind: [s[name][kind] for s in by_seed] for kind in kinds}
        for name in CLASSIFIERS
    }
    scores = {
        name: {kind: float(np.mean(x)) for kind, x in by_kind.items()}
        for name, by_kind in values.items()
    }
    rows = [
        (f"{kind}, {name}", f"{np.mean(x):.1%}", f"{np.std(x):.1%}")
        for name, by_kind in values.items()
        for kind, x in by_kind.items()
    ]
    for size, (one, eighth) in flops.items():
        work = f"{one / 1e6:.1f} MFLOPs alone", f"{eighth / 1e6:.1f} each of 8"
        rows.append((f"CD-1, {digits.PIXELS * size:,} weights", *work))

    def draw(figure: matplotlib.figure.Figure) -> None:
        left, middle, right = figure.subplots(1, 3, width_ratios=(4, 3, 3))
        places, height = np.arange(len(kinds)), 0.8 / len(values)
        for index, (name, by_kind) in enumerate(values.items()):
            means = [np.mean(x) for x in by_kind.values()]
            errors = [np.std(x) for x in by_kind.values()]
            at = places + index * height
            left.barh(at, means, height, xerr=errors, label=name)
        left.set_yticks(places + height / 2, kinds)
        left.invert_yaxis()
        left.set(xlabel="accuracy of a linear classifier", xlim=(0.5, 1))
        left.legend(fontsize=8, loc="lower right")
        for axes, (kind, weight) in zip(
            (middle, right), learned.bases.items(), strict=True
        ):
            axes.imshow(_mosaic(weight), cmap="gray")
            axes.set_title(f"features, {kind}", fontsize=9)
            axes.axis("off")

    return Result(
        ("features", "accuracy", "deviation over seeds"),
        tuple(rows),
        _claims(errors, scores, flops),
        {"accuracy": by_seed, "errors": errors, "flops": flops},
        draw,
    )


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
