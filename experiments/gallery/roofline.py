"""Roofline: arithmetic intensity of matmuls and of training steps over the batch."""

import functools
import math

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax

import meshpar
from experiments.gallery.paper import Claim, Paper, Result, Setting
from experiments.models.decoder_config import GPT2_KIND, DecoderConfig
from experiments.models.language_model import language_model
from meshpar.contracts import hlo_work
from meshpar.explain import roofline
from meshpar.mesh.chips import CHIPS, Chip

_SIZES = 8192, 8192
"""Of the weight of the matmul."""

_PRINTED = {"v5e": 240.0, "h100": 295.0}
"""{chip: ridge} as "How To Scale Your Model" gives it."""

_SMALL = DecoderConfig(
    vocab=256,
    length=32,
    depth=2,
    embed=64,
    heads=8,
    kv_heads=8,
    mlp=256,
    **GPT2_KIND,
)


def counted(rows: int, num_in: int, num_out: int) -> roofline.Work:
    """The work of a matmul in bfloat16, counted by XLA."""
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((rows, num_in), (num_in, num_out))
    )
    found = jax.jit(jnp.matmul).lower(x, w).cost_analysis()
    return roofline.Work(found["flops"], found["bytes accessed"])


def bisected_rows(chip: Chip) -> int:
    """Rows from which XLA's count of the matmul has more FLOPs than a chip does."""
    low, high = 1, 2**20
    while low < high:
        middle = (low + high) // 2
        work = counted(middle, *_SIZES)
        # Without the library's ridge: which of the two takes longer.
        computes = work.flops / chip.peak_flops
        if computes >= work.moved / chip.memory_bandwidth:
            high = middle
        else:
            low = middle + 1
    return low


def on_cpu(rows: int) -> tuple[roofline.Work, float]:
    """(work of a small decoder's step, FLOPs of its matmuls), compiled for a CPU.

    Its layers are no loop, so that XLA counts each of them.
    """
    tokens = jax.ShapeDtypeStruct((rows, _SMALL.length), jnp.int32)
    program = meshpar.lower(
        language_model(_SMALL),
        optax.adam(1e-4),
        f"data=1,scan_unroll={_SMALL.depth}",
        {"tokens": tokens, "targets": tokens},
        devices=jax.devices()[:1],
    )
    work, text = program.inspection.work, program.compiled.as_text()
    return work, hlo_work.matmul_flops(text)


def written_flops(rows: int) -> float:
    """FLOPs of a step's matmuls: 6 N T, and 12 L S D T of the scores of attention.

    N are the weights that a token is multiplied by: 12 D^2 in a layer, and the head.
    """
    depth, embed, length = _SMALL.depth, _SMALL.embed, _SMALL.length
    weights = depth * 12 * embed**2 + _SMALL.vocab * embed
    return rows * length * (6 * weights + 12 * depth * length * embed)


def chip_claims() -> list[Claim]:
    """Ridges, and the rows from which a matmul computes at the peak."""
    ridges = {name: roofline.ridge(CHIPS[name]) for name in _PRINTED}
    closed = {name: roofline.matmul_rows(chip, *_SIZES) for name, chip in CHIPS.items()}
    tried = {name: bisected_rows(chip) for name, chip in CHIPS.items()}
    sizes = "x".join(map(str, _SIZES))
    return [
        Claim(
            "FLOPs per byte at the ridge, v5e and H100, within 3%",
            ", ".join(f"{x:.0f}" for x in _PRINTED.values()),
            ", ".join(f"{x:.0f}" for x in ridges.values()),
            all(abs(ridges[name] / x - 1) < 0.03 for name, x in _PRINTED.items()),
        ),
        Claim(
            f"rows from which a matmul with {sizes} is bound by compute, by bisecting "
            "what XLA counts",
            ", ".join(f"{x:.1f}" for x in closed.values()) + " by the closed form",
            ", ".join(f"{x}" for x in tried.values()),
            all(0 <= tried[name] - x < 1 for name, x in closed.items()),
        ),
        Claim(
            "a matmul with a weight of 128x128 never is, on v5e",
            "its intensity stays below 64",
            f"{counted(2**20, 128, 128).intensity:.1f} with a million rows",
            math.isinf(roofline.matmul_rows(CHIPS["v5e"], 128, 128))
            and counted(2**20, 128, 128).intensity < ridges["v5e"],
        ),
    ]


def flops_claim(found: dict[int, tuple[roofline.Work, float]]) -> Claim:
    """Whether a compiled step has the FLOPs of the formula."""
    matmuls = [flops / written_flops(n) for n, (_, flops) in found.items()]
    rest = [work.flops / written_flops(n) - 1 for n, (work, _) in found.items()]
    return Claim(
        "FLOPs of a compiled step: matmuls are those of the formula, and the share of "
        "all others falls with the batch",
        "6 N T + 12 L S D T (Narayanan et al., 2021, appendix)",
        ", ".join(f"{x:.4f}" for x in matmuls)
        + "; "
        + ", ".join(f"{x:+.1%}" for x in rest),
        all(abs(x - 1) < 1e-6 for x in matmuls)
        and sorted(rest, reverse=True) == rest
        and rest[-1] >= 0,
    )


def step_claims(works: dict[int, roofline.Work]) -> list[Claim]:
    """Whether intensity grows with the batch as the line through two sizes says.

    Args:
      works: {rows: work} of three batch sizes or more.
    """
    step = roofline.fit(works)
    inner = sorted(works)[1:-1]
    off = max(abs(step.work(n).moved / works[n].moved - 1) for n in inner)
    rising = [works[n].intensity for n in sorted(works)]
    middle = works[inner[0]].intensity
    return [
        Claim(
            "bytes of a compiled step are linear in the rows of its batch, to 5%",
            "",
            f"{off:.1%} off the line through the smallest and the largest",
            off < 0.05,
        ),
        Claim(
            "its intensity grows with the batch",
            "weights are read once for more rows",
            ", ".join(f"{x:.1f}" for x in rising),
            sorted(rising) == rising and rising[0] < rising[-1],
        ),
        Claim(
            f"rows of the intensity of {inner[0]} rows, by the line",
            f"{inner[0]}",
            f"{step.rows_at(middle):.2f}",
            abs(step.rows_at(middle) / inner[0] - 1) < 0.1,
        ),
    ]


def _run(setting: Setting) -> Result:
    setting.progress("matmuls", 0.0)
    claims = chip_claims()
    setting.progress("compiles steps", 0.2)
    found = {
        rows: on_cpu(rows)
        for rows in ((2, 8, 32) if setting.quick else (2, 8, 16, 32, 64))
    }
    works = {rows: work for rows, (work, _) in found.items()}
    claims += [flops_claim(found), *step_claims(works)]
    rows = [
        (
            name,
            f"{roofline.ridge(chip):.0f}",
            f"{roofline.matmul_rows(chip, *_SIZES):.0f}",
            f"{roofline.matmul_rows(chip, 1024, 4096):.0f}",
        )
        for name, chip in CHIPS.items()
    ]
    return Result(
        (
            "chip",
            "ridge, FLOPs per byte",
            "rows of 8192x8192 bound by compute",
            "of 1024x4096",
        ),
        tuple(rows),
        tuple(claims),
        {
            "steps": {n: [work.flops, work.moved] for n, work in works.items()},
        },
        functools.partial(_draw, works),
    )


def _draw(works: dict[int, roofline.Work], figure: matplotlib.figure.Figure) -> None:
    left, right = figure.subplots(1, 2)
    intensities = np.geomspace(1, 1e4, 100)
    for name in ("v5e", "v5p", "v6e", "h100"):
        chip = CHIPS[name]
        roof = [
            roofline.share_of_peak(chip, x) * chip.peak_flops / 1e12
            for x in intensities
        ]
        left.plot(intensities, roof, label=name)
    for batch in (1, 16, 256, 4096):
        x = roofline.matmul(batch, *_SIZES).intensity
        left.axvline(x, color="#bbbbbb", linewidth=0.8)
        left.text(x, 1.2, f"{batch} rows", rotation=90, fontsize=7, va="bottom")
    left.set(xscale="log", yscale="log", ylim=1, xlabel="FLOPs per byte")
    left.set(ylabel="TFLOP/s at most")
    left.legend(fontsize=8)
    step = roofline.fit(works)
    batch = np.geomspace(min(works), 16 * max(works), 60)
    right.plot(batch, [step.work(n).intensity for n in batch], label="line of two")
    right.plot(
        list(works), [w.intensity for w in works.values()], "o", label="compiled"
    )
    limit = step.per_row.intensity
    right.axhline(limit, color="black", linestyle=":", label=f"limit {limit:.0f}")
    right.set(xscale="log", xlabel="rows of a step", ylabel="FLOPs per byte", ylim=0)
    right.legend(fontsize=8)


PAPER = Paper(
    name="roofline",
    title="Rooflines of matmuls and of a training step",
    source="Williams, Waterman, Patterson, CACM 52(4), 2009; Austin et al., How To "
    "Scale Your Model, 2025; no figure of theirs",
    shows="the rate that an intensity allows, by chip, and the intensity of a step "
    "over its batch",
    run=_run,
)
