"""Large batches: which rule for the rate holds the loss after equally many passes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import matplotlib.figure
import numpy as np
import optax

import meshpar
from experiments.gallery import digits, passes, synchronous_sgd
from experiments.gallery.paper import Claim, Paper, Result, Setting
from meshpar.methods import batch_rules as rules
from meshpar.methods.random_search.trials import Trials, Values

_PASSES, _BASE, _SMALL = 6, 32, 1 / 16
"""Passes of every run; rows of the base, and its rate where noise does not matter."""

_RATES = 2.0 ** np.arange(-4, 3)
_TUNED = {"LARS": 2.0 ** np.arange(1, 9), "LAMB": 2.0 ** np.arange(-7, 0)}
"""{optimizer: its rates}, with warm-up over a fifth of the steps."""

SAME, ROOT, LINEAR, WARM = "same rate", "root", "linear", "linear, warm-up"
SGD = "SGD, tuned"
_DIVERGED = 10.0
"""Nats that stand for more."""

Losses = dict[str, float]
"""{rule or optimizer: held-out loss}."""


def losses(
    make: Callable[[Values], optax.GradientTransformation],
    values: dict[str, np.ndarray],
    batch: int,
    seeds: tuple[int, ...],
) -> np.ndarray:
    """Held-out losses [trials] after so many passes, as a mean over seeds."""
    steps = _PASSES * passes.ROWS // batch
    example = next(passes.batches(batch, 1, 0))
    trials = Trials(digits.model(), make, values, example, jax.devices()[:1])
    held_out, found = digits.load()[1]._asdict(), []
    for seed in seeds:
        state = trials.init(seed)
        for rows in passes.batches(batch, steps, seed):
            state, _ = trials.step(state, rows)
        found.append(np.asarray(trials.evaluate(state, held_out)))
    return np.nan_to_num(np.mean(found, axis=0), nan=_DIVERGED).clip(max=_DIVERGED)


def _optimizer(name: str, rate: Any, steps: Any) -> optax.GradientTransformation:
    """LARS or LAMB with so many steps of warm-up."""
    make = rules.lars if name == "LARS" else rules.lamb
    return make(rules.warmed_up(rate, steps))


def _warm(batch: int) -> float:
    """Steps of warm-up: a fifth of all."""
    return _PASSES * passes.ROWS / batch / 5


def _least(found: np.ndarray) -> tuple[float, int, bool]:
    """(the least, its place, whether that is inside)."""
    best = int(found.argmin())
    return float(found[best]), best, 0 < best < len(found) - 1


def best_at_base(seeds: tuple[int, ...]) -> tuple[dict[float, float], float, bool]:
    """({rate: loss} of SGD at the base, the best rate, whether it is inside)."""
    found = losses(lambda v: optax.sgd(v["rate"]), {"rate": _RATES}, _BASE, seeds)
    _, best, inside = _least(found)
    curve = dict(zip(_RATES.tolist(), found.tolist(), strict=True))
    return curve, float(_RATES[best]), inside


def scaled(rate: float, batch: int) -> dict[str, float]:
    """{rule: rate} of a batch, from the rate of the base."""
    linear = rules.linear(rate, batch, _BASE)
    return {SAME: rate, ROOT: rules.root(rate, batch, _BASE), LINEAR: linear}


def by_rule(
    rate: float, batch: int, seeds: tuple[int, ...]
) -> tuple[Losses, Losses, bool]:
    """(losses by rule from the base's best rate, from its small one, grid is inside).

    The first also has SGD with the best rate of a grid.
    """
    best, small = scaled(rate, batch), scaled(_SMALL, batch)
    starts = [*best.values(), best[LINEAR], *small.values()]
    rates = np.concatenate([starts, _RATES])
    warm = np.ones(len(rates))
    warm[len(best)] = _warm(batch)
    make = lambda v: optax.sgd(rules.warmed_up(v["rate"], v["warm"]))  # noqa: E731
    found = losses(make, {"rate": rates, "warm": warm}, batch, seeds)
    least, _, inside = _least(found[len(starts) :])
    names = [*best, WARM]
    large = dict(zip(names, found[: len(names)].tolist(), strict=True))
    slow = found[len(names) : len(starts)].tolist()
    return large | {SGD: least}, dict(zip(small, slow, strict=True)), inside


def tuned(name: str, batch: int, seeds: tuple[int, ...]) -> tuple[float, bool]:
    """(least loss of an optimizer over its grid, whether its rate is inside)."""
    rates = _TUNED[name]
    optimizer = lambda v: _optimizer(name, v["rate"], v["warm"])  # noqa: E731
    values = {"rate": rates, "warm": np.full(len(rates), _warm(batch))}
    least, _, inside = _least(losses(optimizer, values, batch, seeds))
    return least, inside


def _by_hand(name: str, rate: float, batches: list[Any]) -> dict[str, np.ndarray]:
    """Weights after steps of LARS or LAMB, by the papers' recurrences in numpy."""
    weights = {k: x.astype(float) for k, x in digits.start(0).items()}
    first = {k: 0 * x for k, x in weights.items()}
    second = {k: 0 * x for k, x in weights.items()}
    norm = np.linalg.norm
    for t, batch in enumerate(batches, 1):
        now = rate * min(1.0, t / 2)
        for k, g in synchronous_sgd.mean_of_workers(weights, batch).items():
            w = weights[k]
            if name == "LARS":
                first[k] = 0.9 * first[k] + now * 1e-3 * norm(w) / norm(g) * g
                weights[k] = w - first[k]
                continue
            first[k] = 0.9 * first[k] + 0.1 * g
            second[k] = 0.999 * second[k] + 0.001 * g**2
            u = first[k] / (1 - 0.9**t)
            u = u / (np.sqrt(second[k] / (1 - 0.999**t)) + 1e-6)
            weights[k] = w - now * norm(w) / norm(u) * u
    return weights


def recurrence_claims() -> list[Claim]:
    """Whether LARS and LAMB with warm-up, on data=8, are the papers' recurrences."""
    batches, off = list(digits.batches(3, 64, 0)), {}
    for name, rate in {"LARS": 16.0, "LAMB": 0.05}.items():
        program = meshpar.lower(
            digits.model(), _optimizer(name, rate, 2), "data=8", batches[0]
        )
        state = program.init(0, digits.start(0))
        for batch in batches:
            state, _ = program.step(state, batch)
        wanted = _by_hand(name, rate, batches)
        off[name] = max(
            float(np.linalg.norm(state.params[k] - x) / np.linalg.norm(x))
            for k, x in wanted.items()
        )
    return [
        Claim(
            "3 steps on data=8, with warm-up, are the papers' recurrences in numpy",
            "LARS: algorithm 1; LAMB: algorithm 2",
            ", ".join(f"{x:.1e} off ({name})" for name, x in off.items()),
            max(off.values()) < 1e-6,
        )
    ]


def rule_claims(
    curve: dict[float, float],
    large: dict[int, Losses],
    small: dict[int, Losses],
    inside: bool,
) -> list[Claim]:
    """Which rules hold the loss of the base.

    Args:
      curve: {rate: loss} of the base.
      large: {batch: losses}, from the best rate.
      small: {batch: losses}, from the small rate.
      inside: whether all best rates are inside their grids.
    """
    first, last = min(small), max(large)
    start, best = curve[_SMALL], min(curve.values())
    slow, most = small[first], large[last]
    layerwise = {name: most[name] for name in _TUNED if name in most}
    claims = [
        Claim("all best rates lie inside their grids", "", f"{inside}", inside),
        Claim(
            f"from a small rate the linear rule holds the loss for {first} rows, to "
            "10%; the root and the same rate do not",
            "k times the rows, k times the rate (Goyal et al., section 2.1)",
            f"base {start:.3f}; "
            + ", ".join(f"{x:.3f} ({name})" for name, x in slow.items()),
            abs(slow[LINEAR] / start - 1)
            < 0.1
            < min(slow[ROOT], slow[SAME]) / start - 1,
        ),
        Claim(
            f"from the best rate no rule does for {last} rows: it is as large as the "
            "loss's curvature allows",
            "the rule fails where a step is not small",
            f"base {best:.3f}; "
            + ", ".join(f"{most[name]:.3f} ({name})" for name in (SAME, ROOT, LINEAR)),
            all(most[name] > 1.5 * best for name in (SAME, ROOT, LINEAR, WARM, SGD)),
        ),
    ]
    if layerwise:
        claims.append(layerwise_claim(layerwise, most[SGD], best, last))
    return claims


def layerwise_claim(found: Losses, sgd: float, base: float, batch: int) -> Claim:
    """Whether LARS and LAMB lose less than SGD, and more than the base."""
    return Claim(
        f"{' and '.join(found)}, tuned, lose less than SGD for {batch} rows, "
        "and more than the base",
        "they scale to larger batches",
        ", ".join(f"{x:.3f}" for x in found.values())
        + f"; SGD {sgd:.3f}, base {base:.3f}",
        base < min(found.values()) <= max(found.values()) < sgd,
    )


def _run(setting: Setting) -> Result:
    setting.progress("recurrences", 0.0)
    claims = recurrence_claims()
    setting.progress(f"batches of {_BASE}", 0.1)
    curve, rate, inside = best_at_base(setting.seeds)
    large, small = {}, {}
    sizes = (256,) if setting.quick else (128, 256, 512)
    for index, batch in enumerate(sizes):
        setting.progress(f"batches of {batch}", 0.2 + 0.8 * index / len(sizes))
        large[batch], small[batch], within = by_rule(rate, batch, setting.seeds)
        inside &= within
        for name in () if setting.quick else _TUNED:
            large[batch][name], within = tuned(name, batch, setting.seeds)
            inside &= within
    claims += rule_claims(curve, large, small, inside)
    names = list(large[sizes[0]])
    rows = [
        (str(batch), *(f"{large[batch][name]:.3f}" for name in names))
        for batch in sizes
    ]
    return Result(
        ("rows of a batch", *names),
        tuple(rows),
        tuple(claims),
        {"base": curve, "best_rate": rate, "from_best": large, "from_small": small},
        functools.partial(_draw, curve, large, small),
    )


def _draw(
    curve: dict[float, float],
    large: dict[int, Losses],
    small: dict[int, Losses],
    figure: matplotlib.figure.Figure,
) -> None:
    panels = {
        "from a small rate": (small, curve[_SMALL]),
        "from the best rate": (large, min(curve.values())),
    }
    for axes, (title, (found, base)) in zip(
        figure.subplots(1, 2), panels.items(), strict=True
    ):
        batches = [_BASE, *found]
        for name in next(iter(found.values())):
            values = [base, *(min(one[name], 3.0) for one in found.values())]
            axes.plot(batches, values, "o-", markersize=3, label=name)
        axes.set(xscale="log", yscale="log", title=title, xlabel="rows of a batch")
        axes.set_xticks(batches, map(str, batches))
        axes.minorticks_off()
        axes.legend(fontsize=7)
    figure.axes[0].set_ylabel(f"held-out loss after {_PASSES} passes, nats")


PAPER = Paper(
    name="large_batches",
    title="Rules for large batches",
    source="Goyal et al., arXiv:1706.02677; You et al., arXiv:1708.03888 and "
    "arXiv:1904.00962; no figure of theirs",
    shows="held-out loss after equally many passes over batch sizes, by rule for the "
    "rate and by optimizer",
    run=_run,
)
