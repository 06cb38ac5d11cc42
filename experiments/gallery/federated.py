"""McMahan et al. 2017: rounds of federated averaging, on equal and unequal clients."""

import functools
from collections.abc import Sequence

import matplotlib.figure
import numpy as np

from experiments.gallery import digits
from experiments.gallery.elastic import Tuned, inside_claim, tuned
from experiments.gallery.paper import Claim, Paper, Result, Setting
from meshpar.methods.federated import shards as split
from meshpar.methods.federated.averaging import FederatedAveraging, Settings

_CLIENTS, _ROWS, _EACH, _FRACTION = 40, 1280, 32, 0.1
_BATCH = 8
_TARGET, _QUICK_TARGET, _MOST = 0.9, 0.85, 300
"""Shares of held-out digits that are right, and rounds after which we stop."""

_RATES = tuple(0.02 * 2**i for i in range(10))
_IID, _LABELS = "IID", "2 labels a client"
_FEDSGD = "FedSGD"
_ALPHAS = (0.1, 1.0, 100.0)

Rounds = dict[str, dict[str, float]]
"""{split: {case: mean rounds to the target}}."""


def _samples() -> dict[str, np.ndarray]:
    training = digits.load()[0]
    return {"x": training.x[:_ROWS], "y": training.y[:_ROWS]}


def _scores(w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    return np.maximum(x @ w["up"], 0) @ w["down"]


def _step(
    w: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray, rate: float
) -> dict[str, np.ndarray]:
    """A step of SGD on the mean cross-entropy, in numpy."""
    hidden, errors = np.maximum(x @ w["up"], 0), np.exp(_scores(w, x))
    errors /= errors.sum(1, keepdims=True)
    errors[np.arange(len(y)), y] -= 1
    errors /= len(y)
    back = x.T @ ((errors @ w["down"].T) * (hidden > 0))
    down = w["down"] - rate * hidden.T @ errors
    return {"up": w["up"] - rate * back, "down": down}


@functools.cache
def _program(rows: int, rate: float):
    return digits.lower("data=1", rows, rate)


def _federated(
    rows: int, rate: float, owned: split.Shards, settings: Settings
) -> FederatedAveraging:
    start = digits.start(settings.seed)
    program = _program(rows, rate)
    return FederatedAveraging(program, _samples(), owned, settings, params=start)


def recurrence_error(rounds: int = 3, rate: float = 0.3) -> float:
    """Largest distance of a weight from algorithm 1 of the paper, in numpy.

    Clients have unequal numbers of rows; the draws of clients and rows are ours.
    """
    samples = _samples()
    x, y = samples["x"].astype(float), samples["y"]
    owned = split.dirichlet(y, 10, 0.3)
    settings = Settings(fraction=0.4, epochs=2)
    found = _federated(_BATCH, rate, owned, settings)
    weights = {name: w.astype(float) for name, w in digits.start(0).items()}
    for number in range(rounds):
        clients, ends = found.chosen(number), []
        for k in clients:
            own = weights
            for rows in found.rows(number, k):
                own = _step(own, x[rows], y[rows], rate)
            ends.append(own)
        shares = np.array([len(owned[k]) for k in clients], float)
        shares /= shares.sum()
        weights = {
            name: sum(p * own[name] for p, own in zip(shares, ends, strict=True))
            for name in weights
        }
        found.round()
    return max(float(np.abs(found.params[n] - w).max()) for n, w in weights.items())


def descent_error(rounds: int = 5, rate: float = 0.5) -> float:
    """Distance of FedSGD with all clients from gradient descent on all rows."""
    owned = split.iid(_ROWS, _CLIENTS)
    found = _federated(_EACH, rate, owned, Settings(fraction=1.0))
    weights = {name: w.astype(float) for name, w in digits.start(0).items()}
    samples = _samples()
    for _ in range(rounds):
        found.round()
        weights = _step(weights, samples["x"].astype(float), samples["y"], rate)
    return max(float(np.abs(found.params[n] - w).max()) for n, w in weights.items())


def recurrence_claims() -> tuple[Claim, ...]:
    """Whether rounds are those of the paper."""
    error, descent = recurrence_error(), descent_error()
    return (
        Claim(
            "rounds of unequal clients equal algorithm 1 in numpy, to 1e-6",
            "",
            f"{error:.1e} off after 3 rounds",
            error < 1e-6,
        ),
        Claim(
            "FedSGD with all clients is gradient descent on all rows, to 1e-6",
            "the average gradient (section 2)",
            f"{descent:.1e} off after 5 rounds",
            descent < 1e-6,
        ),
    )


def rounds_to_target(
    case: int | str,
    owned: split.Shards,
    rate: float,
    seed: int,
    target: float,
    most: int = _MOST,
) -> float:
    """Rounds until the held-out accuracy is at the target; infinite after `most`.

    Args:
      case: epochs with batches of `_BATCH` rows, or `_FEDSGD`.
      owned: rows of the clients.
      rate: of the clients.
      seed: of weights and draws.
      target: share of held-out digits that are right.
      most: rounds after which it gives up.
    """
    epochs, rows = (1, _EACH) if case == _FEDSGD else (int(case), _BATCH)
    settings = Settings(_FRACTION, epochs, seed)
    found, held_out = _federated(rows, rate, owned, settings), digits.load()[1]
    for number in range(most):
        found.round()
        weights = {name: np.asarray(w) for name, w in found.params.items()}
        right = _scores(weights, held_out.x).argmax(1) == held_out.y
        if right.mean() >= target:
            return number + 1
        if not np.isfinite(weights["down"]).all():
            break
    return float("inf")


def _owners(kind: str | float, seed: int) -> split.Shards:
    labels = _samples()["y"]
    if kind == _IID:
        return split.iid(_ROWS, _CLIENTS, seed)
    if kind == _LABELS:
        return split.by_label(labels, _CLIENTS, 2, seed)
    return split.dirichlet(labels, _CLIENTS, kind, seed)


def measured(
    kind: str | float, case: int | str, seeds: Sequence[int], target: float
) -> tuple[list[float], Tuned]:
    """(rounds to the target by seed, the best rate for the first seed)."""
    least = _MOST

    def rounds(rate: float) -> float:
        nonlocal least  # A rate that needs more rounds than another one may stop.
        owned = _owners(kind, seeds[0])
        found = rounds_to_target(case, owned, rate, seeds[0], target, least)
        least = int(min(least, found))
        return min(found, 1e8)

    best = tuned(rounds, _RATES)
    others = [
        rounds_to_target(case, _owners(kind, seed), best.rate, seed, target)
        for seed in seeds[1:]
    ]
    return [best.loss, *others], best


def skew_claim(rounds: dict[float, float]) -> Claim:
    """Whether more even shares of the labels need fewer rounds.

    Args:
      rounds: {alpha: mean rounds to the target}, by rising alpha.
    """
    found = list(rounds.values())
    return Claim(
        "Dirichlet shares: the more even they are, the fewer rounds",
        "accuracy rises with alpha (Hsu et al., figure 2)",
        ", ".join(f"{n:.1f} (alpha={alpha:g})" for alpha, n in rounds.items()),
        all(b < a for a, b in zip(found, found[1:], strict=False)),
    )


def claims_of(found: Rounds, best: Sequence[Tuned]) -> tuple[Claim, ...]:
    """Claims about the rounds to the target, each case with its best rate."""
    iid, labels = found[_IID], found[_LABELS]
    epochs = [case for case in iid if case != _FEDSGD]
    speedups = {case: iid[_FEDSGD] / iid[case] for case in epochs}
    slower = {case: labels[case] / iid[case] for case in epochs}
    ratios = lambda x: ", ".join(f"{r:.1f}x ({c})" for c, r in x.items())  # noqa: E731
    return (
        Claim(
            "IID clients: local epochs need fewer rounds than FedSGD",
            "10 to 100 times fewer (abstract)",
            ratios(speedups),
            all(ratio > 1 for ratio in speedups.values()),
        ),
        Claim(
            "clients of two labels need more rounds than IID ones",
            "more rounds (table 2)",
            ratios(slower),
            all(ratio > 1 for ratio in slower.values()),
        ),
        Claim(
            "they still need fewer than FedSGD on the same clients",
            "2.8 to 3.7 times fewer (section 3)",
            ratios({case: labels[_FEDSGD] / labels[case] for case in epochs}),
            all(labels[case] < labels[_FEDSGD] for case in epochs),
        ),
        inside_claim(best),
    )


def _run(setting: Setting) -> Result:
    cases = (_FEDSGD, 5) if setting.quick else (_FEDSGD, 1, 5, 20)
    kinds = (_IID, _LABELS) if setting.quick else (_IID, _LABELS, *_ALPHAS)
    target = _QUICK_TARGET if setting.quick else _TARGET
    found: dict[str, dict[str, list[float]]] = {}
    best, done = [], 0
    for kind in kinds:
        for case in cases if kind in (_IID, _LABELS) else (5,):
            setting.progress(f"{kind}, {case}", done / 12)
            name = case if case == _FEDSGD else f"E={case}"
            rounds, one = measured(kind, case, setting.seeds, target)
            label = kind if isinstance(kind, str) else f"Dirichlet, alpha={kind:g}"
            found.setdefault(label, {})[name] = rounds
            best.append(one)
            done += 1
    means = {
        kind: {case: float(np.mean(x)) for case, x in by_case.items()}
        for kind, by_case in found.items()
    }

    claims = [*recurrence_claims(), *claims_of(means, best)]
    if not setting.quick:
        labels = {alpha: f"Dirichlet, alpha={alpha:g}" for alpha in _ALPHAS}
        claims.append(skew_claim({a: means[x]["E=5"] for a, x in labels.items()}))

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        names = list(found[_IID])
        for index, (kind, by_case) in enumerate(found.items()):
            places = [names.index(case) + 0.15 * index for case in by_case]
            errors = [float(np.std(x)) for x in by_case.values()]
            axes.bar(places, means[kind].values(), 0.15, yerr=errors, label=kind)
        axes.set_xticks(np.arange(len(names)) + 0.15, names)
        axes.set(yscale="log", ylabel=f"rounds to {target:.0%} of held-out digits")
        box = dict(loc="lower center", bbox_to_anchor=(0.5, 1))
        axes.legend(fontsize=8, ncols=5, **box)

    table = [
        (kind, case, f"{np.mean(x):.1f}", f"{np.std(x):.1f}")
        for kind, by_case in found.items()
        for case, x in by_case.items()
    ]
    return Result(
        ("clients", "local epochs", "rounds to the target", "deviation over seeds"),
        tuple(table),
        tuple(claims),
        {"rounds": found, "rates": [one.rate for one in best]},
        draw,
    )


PAPER = Paper(
    name="federated",
    title="Federated averaging: rounds over local epochs",
    source="McMahan, Moore, Ramage, Hampson, Aguera y Arcas, AISTATS 2017, "
    "arXiv:1602.05629, algorithm 1 and table 2; Hsu et al., arXiv:1909.06335 "
    "(Dirichlet)",
    shows="rounds until a digit classifier is right on 90% of held-out digits, 4 of 40 "
    "clients a round, by local epochs and by who owns which digits",
    run=_run,
)
