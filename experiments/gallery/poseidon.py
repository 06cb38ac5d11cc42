"""Poseidon: bytes of dense gradients and of sufficient factors, by layer."""

import math
from typing import NamedTuple

import jax
import matplotlib.figure
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import meshpar
from experiments.gallery import wires
from experiments.gallery.paper import Claim, Paper, Result, Setting
from experiments.recipes import mixtures, published
from experiments.recipes.config import Config
from meshpar.methods import sufficient_factors as factors

_ROWS_PER_WORKER = 32
"""Pictures per worker, as in the paper."""

_DEVICES = 8
_WORKERS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
_LAYERS = {
    "VGG19 fc6": (25_088, 4096),
    "VGG19 fc7": (4096, 4096),
    "VGG19 fc8": (4096, 1000),
    "VGG19-22K fc8": (4096, 21_841),
}
"""{layer: (inputs, outputs)} of the paper's fully connected layers."""

_MB = 10**6


def flip(num_in: int, num_out: int) -> int:
    """The first of all numbers of workers with which the dense gradient is sent."""
    workers = 1
    while factors.pick(workers * _ROWS_PER_WORKER, num_in, num_out) == factors.FACTORS:
        workers += 1
    return workers


def language_layers(config: Config) -> dict[str, tuple[int, int]]:
    """{name: (inputs, outputs)} of the dense layers of a decoder."""
    model = config.model
    return {
        "attention": (model.embed, model.heads * model.head_dim),
        "mlp": (model.embed, model.mlp),
        "head": (model.embed, model.vocab),
    }


def picks_of_language_models() -> dict[str, set[str]]:
    """{recipe: what is picked for its layers}, at its published batch."""
    found = {}
    for name, make in (published.RECIPES | mixtures.RECIPES).items():
        config = make()
        tokens = config.batch_size * config.model.length
        layers = language_layers(config).values()
        found[name] = {factors.pick(tokens, *sizes) for sizes in layers}
    return found


class Compiled(NamedTuple):
    """A dense layer's gradient on 8 devices, summed in one of the two ways.

    Attributes:
      sent: bytes that a device sends, from the compiled program.
      error: of the gradient, relative to x^T dy in numpy.
    """

    sent: float
    error: float


def compiled(by_factors: bool, rows: int = 32, num_in: int = 48, num_out: int = 80):
    """Compiles and runs the gradient of a layer of given sizes; returns `Compiled`."""
    mesh = meshpar.mesh.make_mesh(
        meshpar.layouts.parse(f"data={_DEVICES}"), jax.devices()[:_DEVICES]
    )
    draws = np.random.default_rng(0)
    x, dy, w = (
        draws.normal(size=shape).astype(np.float32)
        for shape in ((rows, num_in), (rows, num_out), (num_in, num_out))
    )

    def gradient(x: jax.Array, dy: jax.Array, w: jax.Array) -> jax.Array:
        # Without factors the gradient is this device's own, and then summed.
        layer = lambda w: factors.dense(x, w, "data")  # noqa: E731
        if not by_factors:
            w = jax.lax.pcast(w, ("data",), to="varying")
            return jax.lax.psum(jax.vjp(lambda w: x @ w, w)[1](dy)[0], "data")
        return jax.vjp(layer, w)[1](dy)[0]

    split, whole = PartitionSpec("data"), PartitionSpec()
    specs = {"in_specs": (split, split, whole), "out_specs": whole}
    mapped = jax.shard_map(gradient, mesh=mesh, **specs)
    program = jax.jit(mapped).lower(x, dy, w).compile()
    wanted = x.astype(float).T @ dy.astype(float)
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip((x, dy, w), (split, split, whole), strict=True)
    ]
    found = np.asarray(program(*placed))
    sent = sum(wires.sent(program.as_text(), mesh.shape).values())
    return Compiled(sent, float(np.abs(found - wanted).max() / np.abs(wanted).max()))


def _compiled_claims() -> tuple[Claim, ...]:
    """Whether compiled programs send the bytes by which the picker decides."""
    sizes = 32, 48, 80
    ways = {True: compiled(True, *sizes), False: compiled(False, *sizes)}
    predicted = {
        True: factors.factor_bytes(*sizes, _DEVICES),
        False: factors.dense_bytes(*sizes[1:], _DEVICES),
    }
    off = max(abs(ways[way].sent / predicted[way] - 1) for way in ways)
    error = max(one.error for one in ways.values())
    return (
        Claim(
            f"compiled programs of {_DEVICES} devices send these bytes",
            "",
            f"factors {ways[True].sent:,.0f}, dense {ways[False].sent:,.0f} bytes",
            off < 1e-6,
        ),
        Claim(
            "the product of the factors is the gradient, to 1e-5",
            "exact",
            f"{error:.1e} off numpy's",
            error < 1e-5,
        ),
    )


def _claims(
    right: list[bool], flips: dict[str, int], picks: dict[str, set[str]]
) -> tuple[Claim, ...]:
    expected = {
        layer: math.ceil(2 * m * n / (m + n) / _ROWS_PER_WORKER)
        for layer, (m, n) in _LAYERS.items()
    }
    sent = factors.factor_bytes(8 * _ROWS_PER_WORKER, *_LAYERS["VGG19 fc7"], 8)
    ratio = factors.dense_bytes(*_LAYERS["VGG19 fc7"], 8) / sent
    return (
        Claim(
            "the picker takes fewer bytes for every layer and number of workers",
            "algorithm 1",
            f"{sum(right)} of {len(right)}",
            all(right),
        ),
        Claim(
            "it flips where P K (M + N) = 2 M N, K=32",
            ", ".join(map(str, expected.values())) + " workers",
            ", ".join(map(str, flips.values())) + " workers",
            flips == expected,
        ),
        Claim(
            "bytes of fc7 on 8 workers, dense over factors",
            "58.7 M numbers by servers, 3.7 M by factors: 16 times",
            f"{ratio:.1f} times, against an all_reduce",
            round(ratio) == 16,
        ),
        Claim(
            f"never for the layers of {len(picks)} language models",
            "",
            ", ".join(sorted(set().union(*picks.values()))),
            all(found == {factors.DENSE} for found in picks.values()),
        ),
    )


def _run(setting: Setting) -> Result:
    setting.progress("bytes", 0.0)
    rows, flips, right = [], {}, []
    curves: dict[str, dict[int, float]] = {}
    for layer, sizes in _LAYERS.items():
        flips[layer] = flip(*sizes)
        curves[layer] = {}
        for n in _WORKERS:
            sent = factors.factor_bytes(n * _ROWS_PER_WORKER, *sizes, n)
            dense = factors.dense_bytes(*sizes, n)
            picked = factors.pick(n * _ROWS_PER_WORKER, *sizes)
            right.append((picked == factors.FACTORS) == (sent < dense))
            curves[layer][n] = sent / dense
        at_8 = factors.factor_bytes(8 * _ROWS_PER_WORKER, *sizes, 8) / _MB
        dense = factors.dense_bytes(*sizes, 8) / _MB
        rows.append((layer, f"{dense:.1f}", f"{at_8:.1f}", str(flips[layer])))
    picks = picks_of_language_models()

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        for layer, by_workers in curves.items():
            axes.plot(_WORKERS, list(by_workers.values()), "o-", label=layer)
        axes.axhline(1, color="black", linestyle=":", label="equal bytes")
        axes.set(xscale="log", yscale="log", xlabel="workers, 32 pictures each")
        axes.set_ylabel("bytes of the factors / bytes of the dense gradient")
        axes.set_xticks(_WORKERS, map(str, _WORKERS))
        axes.minorticks_off()
        axes.legend()

    return Result(
        ("layer", "dense, MB of 8 workers", "factors, MB", "dense from workers"),
        tuple(rows),
        (*_claims(right, flips, picks), *_compiled_claims()),
        {
            "factors_over_dense": curves,
            "dense_from_workers": flips,
            "language_models": {name: sorted(found) for name, found in picks.items()},
        },
        draw,
    )


PAPER = Paper(
    name="poseidon",
    title="Poseidon: sufficient factors or dense gradients",
    source="Zhang et al., USENIX ATC 2017, arXiv:1706.03292, section 3.2 and table 1",
    shows="bytes of sufficient factors over those of dense gradients, by layer and "
    "number of workers",
    run=_run,
)
