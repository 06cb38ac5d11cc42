"""GPipe: bubble against microbatches, and how much larger a model more stages hold."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import matplotlib.figure
import optax

import meshpar
from experiments.gallery import legal_layouts, plain
from experiments.gallery.paper import Claim, Paper, Result, Setting
from experiments.models.decoder_config import GPT2_KIND, DecoderConfig
from experiments.models.language_model import language_model
from meshpar.explain.report import explain
from meshpar.schedules import make_schedule

_STAGES = (2, 4, 8)
_RATIOS = (1, 2, 4, 8)
"""Microbatches over stages, M / K."""

_BUDGET = 16e9
"""Bytes of one device: a TPU v3 core, as in the paper."""

_MACHINE = "v5e:2x2"
_ENOUGH, _SEQUENCES = 4, 32
"""Microbatches per stage from which the bubble is small; sequences of a batch."""


def bubbles() -> dict[int, dict[int, float]]:
    """{K stages: {M microbatches: bubble of the table of ticks}}."""
    return {
        k: {
            ratio * k: make_schedule("gpipe", k, ratio * k).bubble()
            for ratio in _RATIOS
        }
        for k in _STAGES
    }


def peak_bytes(stages: int, depth: int) -> int:
    """Predicted peak of one device, with rematerialization; nothing is compiled."""
    program = _program(stages, depth, jax.devices()[:stages])
    return program.lowering.memory(program.abstract_batch).total


def _program(
    stages: int, depth: int, devices: Sequence[jax.Device]
) -> meshpar.TrainProgram:
    """Layers of the width of the paper's Transformer; one sequence a microbatch."""
    config = DecoderConfig(
        vocab=32_000,
        length=1024,
        depth=depth,
        embed=2048,
        heads=16,
        kv_heads=16,
        mlp=8192,
        **GPT2_KIND,
    )
    layout = f"microbatches={_SEQUENCES},remat=full"
    if stages > 1:
        layout = f"pipe={stages},schedule=gpipe,{layout}"
    tokens = jax.ShapeDtypeStruct((_SEQUENCES, config.length), jnp.int32)
    return meshpar.lower(
        language_model(config),
        optax.sgd(0.1, 0.9),
        layout,
        {"tokens": tokens, "targets": tokens},
        devices=devices,
        lowering="shard_map",
    )


def most_layers(stages: int) -> int:
    """The deepest model that fits, on the line through one and two layers per stage."""
    low, high = (peak_bytes(stages, stages * n) for n in (1, 2))
    return stages * int(1 + (_BUDGET - low) / (high - low))


def equality_claim() -> Claim:
    """Whether a pipeline trains as plain training on one device does."""
    model, optimizer = legal_layouts.small_model(), optax.sgd(0.1, 0.9)
    batches = legal_layouts.small_batches(3)
    layout = "pipe=4,schedule=gpipe,microbatches=8"
    devices = jax.devices()[:4]
    program = meshpar.lower(model, optimizer, layout, batches[0], devices=devices)
    off = plain.error(program, optimizer, batches)
    return Claim(
        "4 stages and 8 microbatches train as one device, to 1e-5",
        "consistent gradients whatever the number of partitions (section 2.2)",
        f"{off:.1e} off after {len(batches)} steps",
        off < 1e-5,
    )


def compiled_claim() -> Claim:
    """Whether the compiler of TPUs needs the memory that is predicted."""
    found = explain(_program(4, 4, meshpar.mesh.topology(_MACHINE)))
    ratio = found.compiled_bytes["peak"] / found.predicted.total
    return Claim(
        f"peak of 4 stages, compiled for {_MACHINE}, over the prediction",
        "",
        f"{ratio:.2f}",
        0.85 < ratio < 1.15,
    )


def bubble_claims(found: dict[int, dict[int, float]]) -> tuple[Claim, ...]:
    """Claims about `bubbles`."""
    off = max(
        abs(bubble - (k - 1) / (m + k - 1))
        for k, by_microbatches in found.items()
        for m, bubble in by_microbatches.items()
    )
    largest = max(found[k][_ENOUGH * k] for k in _STAGES)
    return (
        Claim(
            "bubble of the tables of ticks",
            "(K-1)/(M+K-1)",
            f"at most {off:.0e} off",
            off < 1e-9,
        ),
        Claim("bubble for M >= 4 K", "negligible", f"<= {largest:.3f}", largest < 0.2),
    )


def _run(setting: Setting) -> Result:
    setting.progress("schedules", 0.0)
    found = bubbles()
    layers = {}
    for index, stages in enumerate((1, *_STAGES)):
        setting.progress(f"memory of {stages} stages", (1 + index) / 5)
        layers[stages] = most_layers(stages)
    rows = [("1", *("0" for _ in _RATIOS), str(layers[1]))]
    for k in _STAGES:
        cells = (f"{found[k][ratio * k]:.3f}" for ratio in _RATIOS)
        rows.append((str(k), *cells, str(layers[k])))
    growth = layers[8] / layers[2]
    at_limit = peak_bytes(4, layers[4]) / _BUDGET
    setting.progress("trains", 0.9)
    claims = (
        equality_claim(),
        *(() if setting.quick else (compiled_claim(),)),
        *bubble_claims(found),
        Claim(
            "4 times the stages hold 4 times the layers",
            "103, 415, 1663 layers with 8, 32, 128 stages",
            f"{layers[2]}, {layers[8]} layers with 2, 8 stages",
            3.8 < growth < 4.2,
        ),
        Claim(
            "memory is linear in the layers: the deepest model fits",
            "",
            f"{at_limit:.3f} of the memory with 4 stages",
            0.9 < at_limit <= 1.0,
        ),
    )

    def draw(figure: matplotlib.figure.Figure) -> None:
        left, right = figure.subplots(1, 2)
        for k, by_microbatches in found.items():
            left.plot(_RATIOS, list(by_microbatches.values()), "o-", label=f"K={k}")
        left.set(xlabel="microbatches / stages", ylabel="bubble", xticks=_RATIOS)
        left.set_ylim(bottom=0)
        left.legend()
        right.plot(list(layers), list(layers.values()), "o-")
        right.set(xlabel="stages", ylabel="layers that fit in 16 GB per device")
        right.set_ylim(bottom=0)

    return Result(
        ("stages K", *(f"bubble, M={r}K" for r in _RATIOS), "layers in 16 GB each"),
        tuple(rows),
        claims,
        {"bubble": found, "layers": layers},
        draw,
    )


PAPER = Paper(
    name="gpipe",
    title="GPipe: bubble, and the model that fits",
    source="Huang et al., NeurIPS 2019, arXiv:1811.06965, section 2.3 and table 1",
    shows="bubble over microbatches, and layers that fit over stages, from schedules "
    "and predicted memory",
    run=_run,
)
