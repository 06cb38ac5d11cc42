"""Synchronous SGD: one gradient of all workers, its bytes, and how fast it descends."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import meshpar
from experiments.gallery import descent_rates as rates
from experiments.gallery import digits, legal_layouts, plain, wires
from experiments.gallery.paper import Claim, Paper, Result, Setting
from meshpar.arrays import num_bytes

_WORKERS, _ROWS, _RATE, _EQUAL = 8, 64, 0.5, 1e-6
_TOTALS = 64
"""Bytes that a step may reduce beside the gradient: its loss and its weight."""

_RING, _SIZES = 1024, (2, 4, 8)
"""Numbers that a ring adds up, and devices on it."""

_CURVATURES = 0.1, 1.0
"""mu and L of the problem of gradient descent."""


def mean_of_workers(
    weights: dict[str, np.ndarray], batch: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The mean of 8 workers' gradients of the digits' classifier, by hand in numpy."""
    up, down = (weights[name].astype(float) for name in ("up", "down"))
    parts = [np.split(batch[name], _WORKERS) for name in ("x", "y")]
    total = {"up": np.zeros_like(up), "down": np.zeros_like(down)}
    for x, y in zip(*parts, strict=True):
        hidden = x.astype(float) @ up
        logits = np.maximum(hidden, 0) @ down
        shares = np.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        errors = (shares - np.eye(digits.CLASSES)[y]) / len(y)
        total["down"] += np.maximum(hidden, 0).T @ errors
        total["up"] += x.T.astype(float) @ ((errors @ down.T) * (hidden > 0))
    return {name: x / _WORKERS for name, x in total.items()}


def gradient_error() -> float:
    """Largest relative error of the gradient of `data=8` against that mean."""
    program, start = digits.lower(f"data={_WORKERS}", _ROWS, _RATE), digits.start(0)
    batch = next(digits.batches(1, _ROWS, 0))
    _, found = program.gradients(program.init(0, start), batch)
    return max(
        float(np.abs(found[name] - x).max() / np.abs(x).max())
        for name, x in mean_of_workers(start, batch).items()
    )


def _program(layout: str) -> meshpar.TrainProgram:
    (batch,) = legal_layouts.small_batches(1)
    model = legal_layouts.small_model()
    return meshpar.lower(model, optax.sgd(0.1), layout, batch, lowering="shard_map")


def reduced(layout: str) -> tuple[float, int]:
    """(payload bytes that a step of a small stack reduces, bytes of its weights)."""
    program = _program(layout)
    payloads = [
        c.payload_bytes * c.executions
        for c in program.collectives
        if c.kind == "all_reduce"
    ]
    return sum(payloads), sum(map(num_bytes, program.abstract_state.params.values()))


def ring(workers: int) -> tuple[float, float]:
    """(bytes that a device sends over the payload, error) of a ring's sum, compiled.

    Every step of the ring is a permute, which sends what it holds.
    """
    layout = meshpar.layouts.parse(f"data={workers}")
    mesh = meshpar.mesh.make_mesh(layout, jax.devices()[:workers])
    spec = PartitionSpec("data")
    x = np.random.default_rng(0).normal(size=(workers, _RING)).astype(np.float32)

    def add(x: jax.Array) -> jax.Array:
        return meshpar.collectives.ring_all_reduce(x[0], "data")[None]

    mapped = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=spec, out_specs=spec))
    placed = jax.device_put(jnp.asarray(x), NamedSharding(mesh, spec))
    program = mapped.lower(placed).compile()
    sent = wires.sent(program.as_text(), mesh.shape)
    wanted = x.astype(float).sum(0)
    error = np.abs(np.asarray(program(placed)) - wanted).max() / np.abs(wanted).max()
    return sent.pop("permute") / x[0].nbytes + sum(sent.values()), float(error)


def equality_claims() -> list[Claim]:
    """Whether 8 workers take the step of one device, and what they send."""
    error = gradient_error()
    program = digits.lower(f"data={_WORKERS}", _ROWS, _RATE)
    off = plain.error(program, optax.sgd(_RATE), list(digits.batches(4, _ROWS, 0)))
    payload, size = reduced(f"data={_WORKERS}")
    parts, _ = reduced(f"data={_WORKERS},microbatches=2")
    rings = {n: ring(n) for n in _SIZES}
    wanted = {n: 2 * (n - 1) / n for n in _SIZES}
    return [
        Claim(
            "the gradient of 8 workers is the mean of theirs, by hand, to 1e-6",
            "g = (1/N) sum of g_i",
            f"{error:.1e} off",
            error < _EQUAL,
        ),
        Claim(
            "4 steps on data=8 are those of one device on the whole batch, to 1e-6",
            "synchronous SGD equals SGD",
            f"{off:.1e} off",
            off < _EQUAL,
        ),
        Claim(
            "a compiled step reduces the gradient once, and with microbatches, too",
            "one all-reduce of the gradient",
            f"{payload:,.0f} and {parts:,.0f} bytes; the weights have {size:,.0f}",
            all(0 <= x - size <= _TOTALS for x in (payload, parts)),
        ),
        Claim(
            f"payloads that a device sends for a sum around {_SIZES} devices, compiled",
            ", ".join(f"{x:.2f}" for x in wanted.values()) + ": 2 (N - 1) / N",
            ", ".join(f"{sent:.2f}" for sent, _ in rings.values()),
            all(
                abs(rings[n][0] - wanted[n]) < 1e-9 and rings[n][1] < _EQUAL
                for n in _SIZES
            ),
        ),
    ]


class Rates(NamedTuple):
    """Measured descents.

    Attributes:
      descents: {rate: (factor of a step, closed form)} of gradient descent.
      falling: gaps [steps] of SGD whose rate falls.
      slopes: of these gaps, by seed.
      floors: {workers: (gap at a fixed rate, closed form)}.
      hard: {steps: gap} of a convex problem that is not strongly so.
    """

    descents: dict[float, tuple[float, float]]
    falling: np.ndarray
    slopes: list[float]
    floors: dict[int, tuple[float, float]]
    hard: dict[int, float]


def measure(setting: Setting) -> Rates:
    """Runs all descents."""
    mu, most = _CURVATURES
    closed = {1 / most: 1 - mu / most, 2 / (mu + most): (most - mu) / (most + mu)}
    descents = {r: (rates.gradient_descent(r, 60), x) for r, x in closed.items()}
    falling, floors, hard = [], {}, {}
    horizons = (64, 256, 1024) if setting.quick else (64, 256, 1024, 2048)
    steps, runs = (1024 if setting.quick else 2048), 256
    for index, seed in enumerate(setting.seeds):
        setting.progress("SGD", 0.3 + 0.6 * index / len(setting.seeds))
        falling.append(rates.falling_rate(steps, runs, seed))
        for n in (1, 2, 4, 8):
            found = rates.floor(n, 0.1, 400, 64, seed)
            floors.setdefault(n, []).append(found)
        for horizon in horizons:
            hard.setdefault(horizon, []).append(rates.hard_gap(horizon, 512, seed))
    times = np.arange(1, steps + 1)
    late = slice(steps // 8, None)
    return Rates(
        descents,
        np.mean(falling, axis=0),
        [rates.slope(times[late], gaps[late]) for gaps in falling],
        {n: (float(np.mean(x)), rates.exact_floor(n, 0.1)) for n, x in floors.items()},
        {horizon: float(np.mean(x)) for horizon, x in hard.items()},
    )


def rate_claims(found: Rates) -> list[Claim]:
    """Whether the measured rates are those of theory."""
    off = max(abs(x / closed - 1) for x, closed in found.descents.values())
    apart = max(abs(x / closed - 1) for x, closed in found.floors.values())
    slope = float(np.mean(found.slopes))
    hard = rates.slope(list(found.hard), list(found.hard.values()))
    shares = [found.floors[1][0] / x for x, _ in found.floors.values()]
    return [
        Claim(
            "strongly convex, gradient descent: factor of a step at 1/L and 2/(mu+L)",
            ", ".join(f"{x:.4f}" for _, x in found.descents.values())
            + ": 1 - mu/L and (L-mu)/(L+mu)",
            ", ".join(f"{x:.4f}" for x, _ in found.descents.values()),
            off < 2e-3,
        ),
        Claim(
            "strongly convex, SGD with a rate of 1/(mu t): slope of the gap over steps",
            "-1: O(1/t)",
            f"{slope:.2f}",
            abs(slope + 1) < 0.1,
        ),
        Claim(
            "at a fixed rate SGD stays at the gap of the closed form, within 10%",
            ", ".join(f"{x:.4f}" for _, x in found.floors.values()),
            ", ".join(f"{x:.4f}" for x, _ in found.floors.values()),
            apart < 0.1,
        ),
        Claim(
            "2, 4 and 8 workers divide this gap by as many, and a little more",
            "variance / N",
            ", ".join(f"{x:.2f}" for x in shares[1:]),
            all(0.95 < x / n < 1.3 for n, x in zip(found.floors, shares, strict=True)),
        ),
        Claim(
            "convex, not strongly: slope of the gap of the averaged weights over steps",
            "-1/2: O(1/sqrt(t))",
            f"{hard:.2f}",
            abs(hard + 0.5) < 0.05,
        ),
    ]


def _draw(found: Rates, figure: matplotlib.figure.Figure) -> None:
    left, right = figure.subplots(1, 2)
    steps = np.arange(1, len(found.falling) + 1)
    left.plot(steps, found.falling, label="strongly convex")
    late = steps[len(steps) // 32 :]
    left.plot(late, found.falling[-1] * steps[-1] / late, ":", label="slope -1")
    hard = np.array(list(found.hard.items())).T
    left.plot(*hard, "o-", label="convex, averaged")
    left.plot(hard[0], hard[1][-1] * (hard[0][-1] / hard[0]) ** 0.5, ":")
    left.set(xscale="log", yscale="log", xlabel="steps of 8 workers", ylabel="gap")
    left.legend(fontsize=8)
    workers = list(found.floors)
    measured, closed = np.array(list(found.floors.values())).T
    right.plot(workers, closed, "-", color="#888888", label="closed form")
    right.plot(workers, measured, "o", label="measured")
    right.set(xscale="log", yscale="log", xlabel="workers, one row each")
    right.set(ylabel="gap at a fixed rate")
    right.set_xticks(workers, map(str, workers))
    right.minorticks_off()
    right.legend(fontsize=8)


def _run(setting: Setting) -> Result:
    setting.progress("one step of 8 workers", 0.0)
    claims = equality_claims()
    setting.progress("gradient descent", 0.2)
    found = measure(setting)
    claims += rate_claims(found)
    rows = [
        (str(n), f"{x:.5f}", f"{closed:.5f}") for n, (x, closed) in found.floors.items()
    ]
    return Result(
        ("workers", "gap at a fixed rate", "closed form"),
        tuple(rows),
        tuple(claims),
        {
            "descents": found.descents,
            "slopes": found.slopes,
            "floors": found.floors,
            "hard": found.hard,
            "falling": found.falling[:: len(found.falling) // 64],
        },
        functools.partial(_draw, found),
    )


PAPER = Paper(
    name="synchronous_sgd",
    title="Synchronous SGD on data-parallel workers",
    source="Sergeev, Del Balso, Horovod, arXiv:1802.05799; Bottou, Curtis, Nocedal, "
    "SIAM Review 2018, arXiv:1606.04838, theorems 4.6 and 4.7; no figure of theirs",
    shows="gap to the minimum over steps and over workers, with the bytes of a step",
    run=_run,
)
