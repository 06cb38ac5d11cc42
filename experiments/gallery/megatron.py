"""Megatron-LM: memory per device at a trillion parameters, gain of interleaving."""

import math

import jax
import jax.numpy as jnp
import matplotlib.figure
import optax

import meshpar
from experiments.gallery.paper import Claim, Paper, Result, Setting
from experiments.gallery.published_decoders import (
    GB,
    LENGTH,
    MEGATRON_2021,
    VOCABULARY,
    Published,
    decoder,
    language_model_of,
    num_parameters,
    plan,
    traced_layer,
)
from meshpar.explain.report import Explanation, explain
from meshpar.schedules import make_schedule

_MEMORY_GB = 80.0
"""Of an A100."""

_STAGES, _BATCHES = 12, (12, 24, 36, 48, 60)
"""Pipeline of figure 12 of the paper, and microbatches that 12 divides."""

_CHUNKS = 2
_TENSOR_DEVICES = 8
_MACHINE = "v5p:8x16x24"
"""As many chips as the paper has GPUs for a trillion parameters."""


def formula_parameters(published: Published) -> float:
    """Parameters by equation 2 of the paper: 12 l h^2 (1 + 13/(12h) + (V+s)/(12lh))."""
    depth, embed = published.depth, published.embed
    rest = 13 / (12 * embed) + (VOCABULARY + LENGTH) / (12 * depth * embed)
    return 12 * depth * embed**2 * (1 + rest)


def layout_of(published: Published) -> str:
    """The layout that table 1 of the paper names, without interleaving."""
    axes = {
        "pipe": published.pipe,
        "data": published.data,
        "tensor": published.tensor,
    }
    return ",".join(f"{axis}={size}" for axis, size in axes.items() if size > 1)


def state_gb(published: Published) -> float:
    """GB of training state on one device: the plan at the published layout, exact."""
    state = plan(decoder(published), layout_of(published)).bytes_per_device()
    return sum(state.values()) / GB


def activations_gb(published: Published) -> float:
    """GB of saved stage inputs and of one running layer, on one device.

    A layer is traced at full width over its tensor-parallel devices, one sequence in a
    microbatch, with rematerialization. The number of stage inputs that are held is that
    of 1F1B, which does not grow with the microbatches.
    """
    traced = traced_layer(
        decoder(published, depth=1), f"tensor={published.tensor},remat=full", 1
    )
    stages = published.pipe
    held = max(make_schedule("1f1b", stages, 2 * stages).in_flight())
    layers = -(-published.depth // stages)
    return (held * traced.x + layers * traced.saved + traced.running) / GB


def written_out_gb(published: Published) -> tuple[float, float]:
    """(GB of state, GB of activations) on the first stage, by arithmetic alone.

    State: 16 bytes for each parameter (bfloat16 weight and gradient, float32 weight and
    Adam's moments), 12 h^2 of them in a layer; `tensor` divides layers and vocabulary,
    and leaves the positions whole. Activations: 2P - 1 stage inputs in bfloat16, which
    `tensor` divides, and one layer that runs, s h (34 + 5 a s / h) / t bytes (by
    Korthikanti et al., arXiv:2205.05198, table 2).
    """
    s, h, t = LENGTH, published.embed, published.tensor
    layers = published.depth // published.pipe
    count = (layers * 12 * h**2 + VOCABULARY * h) / t + s * h
    inputs = (2 * published.pipe - 1) * 2 * s * h / t
    layer = s * h * (34 + 5 * published.heads * s / h) / t
    return 16 * count / GB, (inputs + layer) / GB


def compiled(published: Published) -> Explanation:
    """A training step at the published layout, compiled for as many chips of v5p.

    With the published batch, one sequence in a microbatch, interleaving and
    rematerialization; the compiler is that of TPUs.

    Raises:
      MeshparError: the compiler is not installed.
    """
    config, devices = decoder(published), meshpar.mesh.topology(_MACHINE)
    microbatches = published.batch // published.data
    schedule = f"schedule=interleaved,virtual_stages={_CHUNKS}"
    layout = f"{layout_of(published)},microbatches={microbatches},{schedule},remat=full"
    tokens = jax.ShapeDtypeStruct((published.batch, config.length), jnp.int32)
    program = meshpar.lower(
        language_model_of(config),
        optax.adam(1e-4),
        layout,
        {"tokens": tokens, "targets": tokens},
        devices=devices,
        compute_dtype=jnp.bfloat16,
    )
    return explain(program)


def _compiled_claims(found: Explanation) -> tuple[Claim, ...]:
    written = written_out_gb(MEGATRON_2021[-1])
    peak, wrong = found.compiled_bytes["peak"] / GB, len(found.violations)
    return (
        Claim(
            f"a step with interleaving, compiled for {_MACHINE}: GB on a chip",
            f"trained on 3072 A100s of {_MEMORY_GB:.0f} GB",
            f"{peak:.1f}",
            # More than the state, and less than twice what arithmetic adds up.
            sum(written) < peak * 1.2 and peak < min(_MEMORY_GB, 2 * sum(written)),
        ),
        Claim(
            "the compiled program has the collectives that its layout declares",
            "",
            f"{wrong} violations" if wrong else "all of them",
            not wrong,
        ),
    )


def gains() -> dict[int, float]:
    """{microbatches: throughput of interleaved over that of plain 1F1B}."""
    found = {}
    for m in _BATCHES:
        plain = make_schedule("1f1b", _STAGES, m)
        interleaved = make_schedule("interleaved", _STAGES, m, _CHUNKS)
        found[m] = plain.time() / interleaved.time()
    return found


def _claims(
    found: dict[float, tuple[float, float, float]], gain: dict[int, float]
) -> tuple[Claim, ...]:
    trillion = MEGATRON_2021[-1]
    count, state, saved = found[trillion.billions]
    written = written_out_gb(trillion)
    off = abs(count * 1e9 / formula_parameters(trillion) - 1)
    return (
        Claim(
            "parameters of the largest model, in billions",
            "1008.0 (equation 2)",
            f"{count:.1f}",
            off < 1e-3 and round(count) == 1008,
        ),
        Claim(
            f"a trillion parameters fit into {_MEMORY_GB:.0f} GB per device",
            "trained on 3072 A100s of 80 GB",
            f"{state:.1f} GB of state + {saved:.1f} GB of activations",
            state + saved < _MEMORY_GB,
        ),
        Claim(
            "this state is that of arithmetic, to 1%",
            "",
            f"{state:.2f} of {written[0]:.2f} GB",
            abs(state / written[0] - 1) < 0.01,
        ),
        Claim(
            "these activations are those of arithmetic, and at most half more",
            "s b h (34 + 5 a s / h) / t of a layer (arXiv:2205.05198)",
            f"{saved:.2f} of {written[1]:.2f} GB",
            1 <= saved / written[1] < 1.5,
        ),
        Claim(
            "the gains are those of the bubbles' closed forms",
            "V (M + P - 1) / (V M + P - 1)",
            ", ".join(f"{g - 1:.1%}" for g in gain.values()),
            all(
                math.isclose(
                    g,
                    _CHUNKS * (m + _STAGES - 1) / (_CHUNKS * m + _STAGES - 1),
                    rel_tol=1e-9,
                )
                for m, g in gain.items()
            ),
        ),
        Claim(
            f"interleaving gains with few microbatches (M={_BATCHES[0]})",
            "10% and more",
            f"{gain[_BATCHES[0]] - 1:.0%}, without its communication",
            gain[_BATCHES[0]] > 1.1,
        ),
        Claim(
            "its gain shrinks as microbatches grow",
            "the gap closes",
            f"{gain[_BATCHES[0]] - 1:.0%} to {gain[_BATCHES[-1]] - 1:.0%}",
            sorted(gain.values(), reverse=True) == list(gain.values()),
        ),
    )


def _run(setting: Setting) -> Result:
    chosen = [m for m in MEGATRON_2021 if m.tensor == _TENSOR_DEVICES]
    chosen = chosen[-1:] if setting.quick else chosen
    rows, found = [], {}
    for index, published in enumerate(chosen):
        setting.progress(f"{published.billions} B", 0.5 * index / len(chosen))
        count = num_parameters(decoder(published)) / 1e9
        state, saved = state_gb(published), activations_gb(published)
        found[published.billions] = (count, state, saved)
        cells = (f"{count:.1f}", f"{state:.1f}", f"{saved:.1f}")
        rows.append((f"{published.billions} B", layout_of(published), *cells))
    gain = gains()
    claims = _claims(found, gain)
    if not setting.quick:
        setting.progress(f"compiles for {_MACHINE}", 0.5)
        claims += _compiled_claims(compiled(MEGATRON_2021[-1]))

    def draw(figure: matplotlib.figure.Figure) -> None:
        left, right = figure.subplots(1, 2)
        names = [f"{billions:g}" for billions in found]
        states = [state for _, state, _ in found.values()]
        left.bar(names, states, label="training state")
        more = [saved for _, _, saved in found.values()]
        left.bar(names, more, bottom=states, label="activations")
        left.axhline(
            _MEMORY_GB, color="black", linestyle=":", label="memory of an A100"
        )
        left.set(xlabel="billion parameters", ylabel="GB per device")
        left.tick_params(axis="x", labelsize=8)
        left.legend(fontsize=8)
        right.plot(list(gain), [100 * (g - 1) for g in gain.values()], "o-")
        right.set(xlabel=f"microbatches, P={_STAGES}", ylabel="gain of interleaving, %")
        right.set(ylim=0, xticks=_BATCHES)

    return Result(
        ("model", "layout", "parameters, B", "state, GB", "activations, GB"),
        tuple(rows),
        claims,
        {"parameters_state_activations": found, "gain": gain},
        draw,
    )


PAPER = Paper(
    name="megatron",
    title="Megatron-LM: a trillion parameters, and interleaving",
    source="Narayanan et al., SC 2021, arXiv:2104.04473, table 1, figure 12",
    shows="state and activations per device at the published layouts, from plans, "
    "traces and a compiled program; throughput gained by interleaving, from schedules",
    run=_run,
)
