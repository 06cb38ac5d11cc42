"""Megatron's collectives of a layer, counted in compiled programs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.figure
import optax

import meshpar
from experiments.gallery import wires
from experiments.gallery.paper import Claim, Paper, Result, Setting
from experiments.models.decoder_config import GPT2_KIND, DecoderConfig
from experiments.models.language_model import language_model
from meshpar.contracts.hlo import parse_hlo

_ROWS, _LENGTH, _EMBED = 4, 32, 64
_DEPTH = 3
_OPTIONS = {"xla_backend_optimization_level": 0}
"""Machine code that is made quickly: it has the same collectives."""

_MACHINE, _WAYS = "v5e:2x2", 4
PLAIN, SEQUENCE = "tensor parallelism", "with sequence parallelism"
_RULES = {PLAIN: ",activations.residual_length=none", SEQUENCE: ""}


class Layer(NamedTuple):
    """Collectives of one layer in a compiled program.

    Attributes:
      counts: {kind of collective: times that it runs}.
      payloads: {kind: payloads of all of them, in tensors of b s h numbers}.
      sent: bytes that a device sends.
    """

    counts: dict[str, int]
    payloads: dict[str, float]
    sent: float


def _program(layout: str, depth: int, devices: Any, wide: int) -> meshpar.TrainProgram:
    config = DecoderConfig(
        vocab=256 * wide,
        length=_LENGTH * wide,
        depth=depth,
        embed=_EMBED * wide,
        heads=8,
        kv_heads=8,
        mlp=4 * _EMBED * wide,
        **GPT2_KIND,
    )
    tokens = jax.ShapeDtypeStruct((_ROWS, config.length), jnp.int32)
    return meshpar.lower(
        language_model(config),
        optax.sgd(0.1),
        layout,
        {"tokens": tokens, "targets": tokens},
        devices=devices,
        compute_dtype=jnp.bfloat16 if wide > 1 else None,
        lowering="shard_map",
    )


def _text(way: str, ways: int, depth: int, forward: bool) -> str:
    """The compiled text of a forward pass or of a step, on CPUs."""
    layout = f"tensor={ways}{_RULES[way]}"
    program = _program(layout, depth, jax.devices()[:ways], 1)
    run = jax.jit(program.evaluate if forward else program.step)
    lowered = run.lower(program.abstract_state, program.abstract_batch)
    return lowered.compile(_OPTIONS).as_text()


def _in_loop(text: str, ways: int, depth: int, payload: int) -> Layer:
    """One layer's part of what runs in the loop over layers."""
    counts: dict[str, int] = {}
    payloads: dict[str, float] = {}
    for one in parse_hlo(text, {"tensor": ways}):
        if one.executions == depth:
            counts[one.kind] = counts.get(one.kind, 0) + 1
            size = one.payload_bytes / payload
            payloads[one.kind] = payloads.get(one.kind, 0.0) + size
    shares = {"all_reduce": 2 * (ways - 1) / ways}
    once = (ways - 1) / ways
    sent = sum(shares.get(kind, once) * x for kind, x in payloads.items())
    return Layer(counts, payloads, sent * payload)


def layer(way: str, forward: bool, ways: int = _WAYS) -> Layer:
    """One layer of a forward pass or of a step, compiled for CPUs in float32."""
    text = _text(way, ways, _DEPTH, forward)
    return _in_loop(text, ways, _DEPTH, 4 * _ROWS * _LENGTH * _EMBED)


def both(way: str) -> tuple[Layer, Layer]:
    """A layer of the (forward pass, step)."""
    return layer(way, True), layer(way, False)


def depth_claim(counts: dict[str, int]) -> Claim:
    """Whether one layer more adds what the loop over layers counts for a step's."""
    texts = [_text(PLAIN, _WAYS, depth, False) for depth in (_DEPTH, _DEPTH + 1)]
    before, after = (wires.counts(text, {"tensor": _WAYS}) for text in texts)
    more = {kind: n - before[kind] for kind, n in after.items() if n > before[kind]}
    return Claim(
        "a program with one layer more has so many collectives more",
        "",
        f"{_said(more)}; in the loop {_said(counts)}",
        more == counts,
    )


def layer_of_tpu(wide: int = 8) -> Layer:
    """One layer's step, compiled for 4 chips in bfloat16."""
    layout, devices = f"tensor=4{_RULES[PLAIN]}", meshpar.mesh.topology(_MACHINE)
    text = _program(layout, _DEPTH, devices, wide).compiled.as_text()
    return _in_loop(text, 4, _DEPTH, 2 * _ROWS * _LENGTH * _EMBED * wide**2)


def _said(found: dict[str, float]) -> str:
    return ", ".join(f"{n:g} x {kind}" for kind, n in sorted(found.items()))


def plain_claims(layers: tuple[Layer, Layer]) -> list[Claim]:
    """Two all-reduces each way, counted on CPUs in a layer of (forward pass, step)."""
    forward, step = layers
    wanted = [{"all_reduce": 2}, {"all_reduce": 4}]
    return [
        Claim(
            "collectives of a layer: forward pass, and step",
            "2 all-reduces forward, 2 backward (section 3)",
            f"{_said(forward.counts)}; {_said(step.counts)}",
            [forward.counts, step.counts] == wanted,
        ),
        Claim(
            "payloads of b s h numbers: forward 2; backward 4 on CPUs, whose compiler "
            "reduces the gradients of q, k and v apart",
            "2 and 2",
            f"{forward.payloads['all_reduce']:.3f} and "
            f"{step.payloads['all_reduce'] - forward.payloads['all_reduce']:.3f}",
            abs(forward.payloads["all_reduce"] - 2) < 1e-6
            and abs(step.payloads["all_reduce"] - 6) < 1e-6,
        ),
    ]


def sequence_claims(plain: Layer, layers: tuple[Layer, Layer]) -> list[Claim]:
    """Gathers and scatters in place of the all-reduces of a plain forward pass."""
    forward, step = layers
    wanted = [
        {"all_gather": 2, "reduce_scatter": 2},
        {"all_gather": 6, "reduce_scatter": 4, "all_reduce": 1},
    ]
    ratio = forward.sent / plain.sent
    return [
        Claim(
            "sequence parallelism: forward pass, and step",
            "2 all-gathers and 2 reduce-scatters each way, and 2 all-gathers of inputs "
            "that are saved once (arXiv:2205.05198, section 4.2.2)",
            f"{_said(forward.counts)}; {_said(step.counts)}",
            [forward.counts, step.counts] == wanted,
        ),
        Claim(
            "all of them are of b s h numbers, but for one all-reduce of the gradients "
            "of norms and biases",
            "4 + 2 and 4",
            _said({kind: round(x, 3) for kind, x in step.payloads.items()}),
            abs(step.payloads["all_gather"] - 6) < 1e-6
            and abs(step.payloads["reduce_scatter"] - 4) < 1e-6
            and step.payloads["all_reduce"] < 0.1,
        ),
        Claim(
            "bytes of a forward pass over those without sequence parallelism",
            "1: a ring's all-reduce is a reduce-scatter and an all-gather",
            f"{ratio:.4f}",
            abs(ratio - 1) < 1e-6,
        ),
    ]


def size_claims(sent: dict[int, float]) -> list[Claim]:
    """Whether bytes grow by (t - 1) / t: {devices: bytes of a plain forward pass}."""
    sizes = tuple(sent)
    payload = 4 * _ROWS * _LENGTH * _EMBED
    wanted = {t: 2 * 2 * (t - 1) / t * payload for t in sizes}
    return [
        Claim(
            f"bytes that a device of {', '.join(map(str, sizes))} sends forward in a "
            "layer",
            ", ".join(f"{x:,.0f}" for x in wanted.values()) + ": 4 (t-1)/t b s h",
            ", ".join(f"{x:,.0f}" for x in sent.values()),
            all(abs(sent[t] / wanted[t] - 1) < 1e-6 for t in sizes),
        )
    ]


def _tpu_claims() -> list[Claim]:
    found = layer_of_tpu()
    return [
        Claim(
            f"a step's layer, compiled for {_MACHINE}: all-reduces, each of b s h",
            "4",
            f"{_said(found.counts)}, {found.payloads.get('all_reduce', 0):.3f} b s h",
            found.counts == {"all_reduce": 4}
            and abs(found.payloads["all_reduce"] - 4) < 1e-6,
        )
    ]


def _run(setting: Setting) -> Result:
    setting.progress("compiles", 0.0)
    plain, sequence = both(PLAIN), both(SEQUENCE)
    claims = plain_claims(plain) + sequence_claims(plain[0], sequence)
    sent = {_WAYS: plain[0].sent}
    if not setting.quick:
        setting.progress("compiles for 2 and 8 devices, and for TPUs", 0.5)
        sent = {2: layer(PLAIN, True, 2).sent, **sent, 8: layer(PLAIN, True, 8).sent}
        claims += [depth_claim(plain[1].counts), *_tpu_claims()]
    claims += size_claims(sent)
    found = {
        (way, name): one
        for way, layers in ((PLAIN, plain), (SEQUENCE, sequence))
        for name, one in zip(("forward", "step"), layers, strict=True)
    }
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    rows = [
        (
            way,
            name,
            *(str(one.counts.get(kind, 0)) for kind in kinds),
            f"{one.sent:,.0f}",
        )
        for (way, name), one in found.items()
    ]

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        names = [f"{way},\n{name}" for way, name in found]
        left = [0.0] * len(names)
        for kind in kinds:
            sizes = [
                one.payloads.get(kind, 0.0) * (1 + (kind == "all_reduce"))
                for one in found.values()
            ]
            axes.barh(names, sizes, left=left, label=kind)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
        axes.invert_yaxis()
        axes.set(xlabel="sent in a layer, (t-1)/t of b s h numbers, CPUs")
        axes.legend(loc="upper right")

    return Result(
        ("layout", "pass", *kinds, f"bytes sent, t={_WAYS}"),
        tuple(rows),
        tuple(claims),
        {
            f"{way}, {name}": {"counts": one.counts, "payloads": one.payloads}
            for (way, name), one in found.items()
        },
        draw,
    )


PAPER = Paper(
    name="megatron_collectives",
    title="Megatron-LM's collectives of a layer",
    source="Shoeybi et al., arXiv:1909.08053, section 3; Korthikanti et al., "
    "arXiv:2205.05198, section 4.2.2",
    shows="what a device sends in a layer, by kind of collective, without and with "
    "sequence parallelism",
    run=_run,
)
