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
from meshpar.mesh.chips import CHIPS, Chip
from meshpar.methods import roofline

_SIZES = 8192, 8192
"""Of the weight of the matmul."""

_PRINTED = {"v5e": 240.0, "h100": 295.0}
"""{chip: ridge} as "How To Scale Your Model" gives it."""

_MACHINE = "v5e:2x2"
_OPTIONS = {"xla_backend_optimization_level": 0}


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


def _config(wide: int) -> DecoderConfig:
    return DecoderConfig(
        vocab=256 * wide,
        length=32 * wide,
        depth=3,
        embed=64 * wide,
        heads=8,
        kv_heads=8,
        mlp=256 * wide,
        **GPT2_KIND,
    )


def _program(rows: int, wide: int, device: jax.Device) -> meshpar.TrainProgram:
    config = _config(wide)
    tokens = jax.ShapeDtypeStruct((rows, config.length), jnp.int32)
    return meshpar.lower(
        language_model(config),
        optax.adam(1e-4),
        "data=1",
        {"tokens": tokens, "targets": tokens},
        devices=[device],
        compute_dtype=jnp.bfloat16 if wide > 1 else None,
    )


def written_flops(rows: int, wide: int) -> float:
    """FLOPs of a step's matmuls: 6 N T, and 12 L S D T of the scores of attention.

    N are the weights that a token is multiplied by: 12 D^2 in a layer, and the head.
    """
    config = _config(wide)
    depth, embed, length = config.depth, config.embed, config.length
    weights = depth * 12 * embed**2 + config.vocab * embed
    return rows * length * (6 * weights + 12 * depth * length * embed)


def on_cpu(rows: int) -> tuple[roofline.Work, float]:
    """(work of a small decoder's step, FLOPs of its matmuls), compiled for a CPU."""
    program = _program(rows, 1, jax.devices()[0])
    lowered = jax.jit(program.step).lower(
        program.abstract_state, program.abstract_batch
    )
    compiled = lowered.compile(_OPTIONS)
    text = compiled.as_text()
    work = roofline.Work(*hlo_work.work_of(text, compiled.cost_analysis()))
    return work, hlo_work.matmul_flops(text)


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
            all(tried[name] == math.ceil(x) for name, x in closed.items()),
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
    matmuls = {
        rows: flops / written_flops(rows, 1) for rows, (_, flops) in found.items()
    }
    every = {rows: w.flops / written_flops(rows, 1) for rows, (w, _) in found.items()}
    return Claim(
        "FLOPs of a compiled step: matmuls are those of the formula, all are 10% more "
        "at most",
        "6 N T + 12 L S D T (Narayanan et al., 2021, appendix)",
        ", ".join(f"{x:.4f}" for x in matmuls.values())
        + "; "
        + ", ".join(f"{x:.3f}" for x in every.values()),
        all(abs(x - 1) < 1e-6 for x in matmuls.values())
        and all(1 <= x < 1.1 for x in every.values()),
    )


def step_claims(works: dict[int, roofline.Work], where: str) -> list[Claim]:
    """Whether intensity grows with the batch as the line through two sizes says.

    Args:
      works: {rows: work} of three batch sizes or more.
      where: what the step is compiled for.
    """
    step = roofline.fit(works)
    inner = sorted(works)[1:-1]
    off = max(abs(step.work(n).moved / works[n].moved - 1) for n in inner)
    rising = [works[n].intensity for n in sorted(works)]
    middle = works[inner[0]].intensity
    return [
        Claim(
            f"bytes of a step, compiled for {where}, are linear in the batch, to 5%",
            "",
            f"{off:.1%} off the line through the smallest and the largest",
            off < 0.05,
        ),
        Claim(
            f"its intensity grows with the batch ({where})",
            "weights are read once for more rows",
            ", ".join(f"{x:.1f}" for x in rising),
            sorted(rising) == rising and rising[0] < rising[-1],
        ),
        Claim(
            f"rows of the intensity of {inner[0]} rows, by the line ({where})",
            f"{inner[0]}",
            f"{step.tokens_at(middle):.2f}",
            abs(step.tokens_at(middle) / inner[0] - 1) < 0.1,
        ),
    ]


def _run(setting: Setting) -> Result:
    setting.progress("matmuls", 0.0)
    claims = chip_claims()
    setting.progress("compiles steps", 0.2)
    small = {rows: on_cpu(rows) for rows in ((2, 16) if setting.quick else (2, 8, 16))}
    claims.append(flops_claim(small))
    works = {rows: work for rows, (work, _) in small.items()}
    where, wide = "CPUs", 1
    if not setting.quick:
        claims += step_claims(works, where)
        setting.progress(f"compiles for {_MACHINE}", 0.5)
        device = meshpar.mesh.topology(_MACHINE)[0]
        where, wide = "v5e", 8
        works = {n: roofline.step_work(_program(n, wide, device)) for n in (1, 4, 16)}
        claims += step_claims(works, where)
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
            "where": where,
            "steps": {n: [work.flops, work.moved] for n, work in works.items()},
        },
        functools.partial(_draw, works, where),
    )


def _draw(
    works: dict[int, roofline.Work], where: str, figure: matplotlib.figure.Figure
) -> None:
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
    right.plot(list(works), [w.intensity for w in works.values()], "o", label=where)
    limit = step.per_token.intensity
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
