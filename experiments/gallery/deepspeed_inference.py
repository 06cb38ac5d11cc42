"""DeepSpeed Inference: latency and throughput by layout, and weights that stream."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np

import meshpar
from experiments.gallery import wires
from experiments.gallery.paper import Claim, Paper, Result, Setting
from experiments.models.decoder_config import GPT2_KIND, DecoderConfig
from experiments.models.language_model import language_model
from meshpar.contracts.cost import wire_bytes
from meshpar.explain.generation import explain_generation
from meshpar.generation import GREEDY, Generator
from meshpar.generation.floor import floor, resident_bytes
from meshpar.layouts.axes import AXES
from meshpar.layouts.plan import HOST_MEMORY
from meshpar.mesh.chips import CHIPS

_KIND = {**GPT2_KIND, "bias": False, "tied": False}
_SMALL = DecoderConfig(
    vocab=64, length=16, depth=2, embed=32, heads=8, kv_heads=8, mlp=128, **_KIND
)
_PROMPTS = ([1, 2, 3], [4], [5, 6, 7, 8], [9, 10])
_TOKENS, _EQUAL = 8, 1e-6
_LAYOUTS = "tensor=2", "tensor=8", "fsdp=2,tensor=2", "data=4"

_CHIP, _MACHINE, _LENGTH, _ITEM = "v5e", "v5e:2x4", 2048, 2
_LARGE = DecoderConfig(
    vocab=51_200,
    length=_LENGTH,
    depth=32,
    embed=4096,
    heads=32,
    kv_heads=32,
    mlp=16_384,
    **_KIND,
)
"""6.7 billion parameters, as GPT-3 6.7B."""

_BATCHES = 8, 32, 128
_SPREAD = {n: f"tensor={n}" for n in (1, 2, 4, 8)}
_HUGE, _MEMORY_GB, _GB = "MT-NLG 530B", 48.0, 1e9
_MT_NLG = dataclasses.replace(
    _LARGE, depth=105, embed=20_480, heads=128, kv_heads=128, mlp=81_920
)
"""105 layers of a width of 20,480, on the paper's A6000 of 48 GB."""


def _generator(
    config: DecoderConfig, layout: str, batch: int, devices: list, dtype=None
) -> Generator:
    count = meshpar.layouts.parse(layout).num_devices
    return meshpar.generator(
        language_model(config),
        layout,
        max_length=config.length,
        batch_size=batch,
        devices=devices[:count],
        compute_dtype=dtype,
    )


@functools.cache
def _weights() -> dict[str, np.ndarray]:
    return jax.device_get(jax.jit(language_model(_SMALL).init)(jax.random.key(0)))


@functools.cache
def plain_loop() -> tuple[list[list[int]], np.ndarray]:
    """(tokens, logits [step, prompt, vocab]) on one device, without a cache.

    Every token runs the whole sequence through the model anew.
    """
    model, weights = language_model(_SMALL), _weights()
    forward = jax.jit(lambda params, ids: model.bind(params)(ids))
    texts, steps = [list(prompt) for prompt in _PROMPTS], []
    for _ in range(_TOKENS):
        ids = np.zeros((len(texts), _SMALL.length), np.int32)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = text
        logits = np.asarray(forward(weights, ids))
        last = np.stack([logits[i, len(text) - 1] for i, text in enumerate(texts)])
        steps.append(last)
        for text, row in zip(texts, last, strict=True):
            text.append(int(row.argmax()))
    return texts, np.stack(steps)


def generated(layout: str) -> tuple[list[list[int]], np.ndarray]:
    """(tokens, logits) of the library's prefill and decoding under a layout."""
    generator = _generator(_SMALL, layout, len(_PROMPTS), jax.devices())
    params = generator.place(_weights())
    state = generator.prefill(params, _PROMPTS, _TOKENS)
    sampling, steps = generator.sampling_arrays(GREEDY), []
    for _ in range(_TOKENS):
        state, logits = generator.decode(params, state, sampling)
        steps.append(np.asarray(logits))
    tokens, lengths = np.asarray(state.tokens), np.asarray(state.length)
    texts = [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]
    return texts, np.stack(steps)


def equality_claims(layouts: tuple[str, ...], streams: bool = True) -> list[Claim]:
    """Whether layouts, and weights that stream, give the plain loop's tokens."""
    texts, logits = plain_loop()
    worst, same, resident = 0.0, 0, {}
    for layout in layouts:
        found, ours = generated(layout)
        worst = max(worst, float(np.abs(ours - logits).max() / np.abs(logits).max()))
        same, resident[layout] = same + (found == texts), ours
    claims = [
        Claim(
            f"{_TOKENS} tokens of {', '.join(layouts)} are those of a loop on one "
            "device without a cache; logits to 1e-6",
            "tensor parallelism and a cache change no text",
            f"{same} of {len(layouts)} layouts, logits {worst:.1e} off",
            same == len(layouts) and worst < _EQUAL,
        ),
    ]
    if not streams:
        return claims
    _, brought = generated(f"{layouts[0]},offload=parameters")
    off = float(np.abs(brought - resident[layouts[0]]).max())
    return [
        *claims,
        Claim(
            "streamed weights give the logits of resident ones, bit for bit",
            "ZeRO-Inference: weights in host memory (section 6)",
            f"{off:.1e} off",
            off == 0,
        ),
    ]


def sent_claim() -> Claim:
    """Whether a token of tensor parallelism moves two sums per layer."""
    generator = _generator(_SMALL, "tensor=8", len(_PROMPTS), jax.devices())
    decode = generator.programs.decode
    axes = {axis: generator.program.mesh.shape[axis] for axis in AXES}
    text = decode.compiled.as_text()
    sent = wires.sent(text, axes)["all_reduce"]
    count = wires.counts(text, axes)["all_reduce"]
    activation = 4 * len(_PROMPTS) * _SMALL.embed * 7 / 8 * 2
    extra = sent - 2 * _SMALL.depth * activation
    return Claim(
        "all_reduces of activations per token, in the compiled program of 8 devices",
        "2 per layer",
        f"{count}, {sent / activation / _SMALL.depth:.2f} activations per layer",
        # The embedding, a part of which each device has, is one more.
        abs(extra - activation) <= 0.25 * activation,
    )


class Predicted(NamedTuple):
    """One layout: seconds of a token of every sequence, and tokens per second."""

    seconds: float
    rate: float


def predicted(layout: str, batch: int) -> Predicted:
    """The floor of reading weights and cache, and the wire of the declared sums."""
    devices = list(meshpar.mesh.topology(_MACHINE))
    generator = _generator(_LARGE, layout, batch, devices, jnp.bfloat16)
    link = 2 * CHIPS[_CHIP].link_bandwidth
    sent = sum(
        wire_bytes(t.kind, t.payload_bytes, t.group_size)
        for t in generator.programs.contract.terms
        if not t.bound
    )
    seconds = floor(generator.programs).seconds + sent / link
    return Predicted(seconds, batch / seconds)


def arithmetic(tensor: int, batch: int) -> float:
    """Seconds of a token, from the shape of the model alone.

    A layer has 12 D^2 weights in matrices and two vectors of a norm; a token of the
    cache has a key and a value of width D per layer.
    """
    c, chip = _LARGE, CHIPS[_CHIP]
    matrices = c.depth * 12 * c.embed**2 + 2 * c.vocab * c.embed
    vectors = (c.depth * 4 + 2 + c.length) * c.embed
    cache = 2 * c.depth * c.embed * c.length * batch
    read = _ITEM * (matrices + cache) / tensor + _ITEM * vectors
    sums = (2 * c.depth + 1) * _ITEM * batch * c.embed
    wire = 2 * (tensor - 1) / tensor * sums / (2 * chip.link_bandwidth)
    return read / chip.memory_bandwidth + wire


def speed_claims(found: Mapping[tuple[str, int], Predicted]) -> list[Claim]:
    """Claims about predicted speeds.

    Args:
      found: {(layout, sequences): its speed}.
    """
    off = max(
        abs(x.seconds / arithmetic(int(layout.removeprefix("tensor=")), batch) - 1)
        for (layout, batch), x in found.items()
        if layout.startswith("tensor=")
    )
    few, many = min(_BATCHES), max(_BATCHES)
    latency = found["tensor=1", few].seconds / found["tensor=8", few].seconds
    rate = found["tensor=8", few].rate / found["data=8", few].rate
    batched = found["tensor=8", many].rate / found["tensor=8", few].rate
    return [
        Claim(
            "predicted seconds of a token are those of arithmetic, within 3%",
            "",
            f"at most {off:.1%} off",
            off < 0.03,
        ),
        Claim(
            f"latency of {few} sequences on one chip over that on 8 with tensor=8",
            "up to 6.4 times lower latency (SC 2022)",
            f"{latency:.1f} times",
            4 < latency < 8,
        ),
        Claim(
            f"tokens per second of {few} sequences, tensor=8 over data=8",
            "1.5 times the throughput",
            f"{rate:.1f} times",
            rate > 1.5,
        ),
        Claim(
            f"tokens per second of {many} sequences over {few}: weights are read once",
            "larger batches for throughput",
            f"{batched:.1f} times",
            2 < batched < many / few,
        ),
    ]


class Streamed(NamedTuple):
    """A model on one chip: GB that stay there, and GB that come from the host."""

    resident: float
    layer: float
    moved: float
    whole: float


def streamed(config: DecoderConfig, devices: list) -> Streamed:
    """Weights in host memory, as the generator states them; nothing is compiled."""
    generator = _generator(
        config, "data=1,offload=parameters", 1, devices, jnp.bfloat16
    )
    programs = generator.programs
    sizes = {
        path: x.dtype.itemsize * math.prod(x.shape)
        for path, x in programs.abstract_params.items()
    }
    on_host = sum(
        size
        for path, size in sizes.items()
        if programs.abstract_params[path].sharding.memory_kind == HOST_MEMORY
    )
    (transfer,) = programs.host
    return Streamed(
        resident_bytes(programs) / _GB,
        on_host / config.depth / _GB,
        transfer.to_device / _GB,
        sum(sizes.values()) / _GB,
    )


def streaming_claim() -> Claim:
    """Whether the largest model of the paper passes through one device's memory."""
    found = streamed(_MT_NLG, list(meshpar.mesh.topology(_MACHINE))[:1])
    needed = found.resident + 2 * found.layer
    c = _MT_NLG
    layers = _ITEM * 12 * c.embed**2 * (c.depth + 1) / _GB
    return Claim(
        f"{_HUGE}, {found.whole:.0f} GB of weights: GB on the chip with two layers "
        "there, GB that a token brings",
        "25 times larger models on one GPU of 48 GB",
        f"{needed:.1f}, {found.moved:.0f}",
        needed < _MEMORY_GB < found.whole / 20 and abs(found.moved / layers - 1) < 0.01,
    )


def compiled_claim() -> Claim:
    """Whether the compiler of TPUs streams as many bytes, and keeps two layers."""
    chip = list(meshpar.mesh.topology(_MACHINE))[:1]
    config = dataclasses.replace(_LARGE, depth=8)
    generator = _generator(config, "data=1,offload=parameters", 1, chip, jnp.bfloat16)
    _, decoding = explain_generation(generator)
    found = streamed(config, chip)
    moved = generator.programs.decode.host_transfers.to_device / _GB
    peak = decoding.compiled_bytes["peak"] / _GB
    return Claim(
        f"8 layers compiled for one chip of {_MACHINE}: GB from the host per token, "
        "GB at the peak",
        f"{found.moved:.2f}, and at most {found.resident + 3 * found.layer:.2f}",
        f"{moved:.2f}, and {peak:.2f}",
        abs(moved / found.moved - 1) < 0.02 and peak < found.resident + 3 * found.layer,
    )


def _run(setting: Setting) -> Result:
    setting.progress("generates", 0.0)
    layouts = _LAYOUTS[:1] if setting.quick else _LAYOUTS
    claims = equality_claims(layouts, streams=not setting.quick)
    setting.progress("counts", 0.4)
    if not setting.quick:
        claims.append(sent_claim())
    found = {}
    for index, layout in enumerate((*_SPREAD.values(), "data=8")):
        setting.progress(f"predicts {layout}", 0.5 + 0.08 * index)
        for batch in _BATCHES:
            found[layout, batch] = predicted(layout, batch)
    claims += speed_claims(found)
    claims.append(streaming_claim())
    if not setting.quick:
        setting.progress(f"compiles for {_MACHINE}", 0.9)
        claims.append(compiled_claim())

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        for layout in (*_SPREAD.values(), "data=8"):
            points = [found[layout, batch] for batch in _BATCHES]
            axes.loglog(
                [1e3 * x.seconds for x in points],
                [x.rate for x in points],
                "s--" if layout == "data=8" else "o-",
                label=layout,
            )
        axes.set(xlabel="ms per token", ylabel="tokens/s of all sequences")
        axes.legend(title=f"layout; {', '.join(map(str, _BATCHES))} sequences")

    rows = [
        (layout, str(batch), f"{1e3 * x.seconds:.2f}", f"{x.rate:,.0f}")
        for (layout, batch), x in found.items()
    ]
    return Result(
        ("layout", "sequences", "ms per token", "tokens/s"),
        tuple(rows),
        tuple(claims),
        {f"{layout}, {batch}": x._asdict() for (layout, batch), x in found.items()},
        draw,
    )


PAPER = Paper(
    name="deepspeed_inference",
    title="DeepSpeed Inference: latency and throughput by layout, and streamed weights",
    source="Aminabadi et al., SC 2022, arXiv:2207.00032, sections 3, 6 and 7",
    shows="predicted tokens per second over the time of a token of a GPT of 6.7 "
    "billion parameters on v5e; nothing is run",
    run=_run,
)
