"""ZeRO-Offload and GeePS: larger models on one device, with state in host memory."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax

import meshpar
from experiments.gallery.paper import Claim, Paper, Result, Setting
from experiments.models.decoder_config import GPT2_KIND, DecoderConfig
from experiments.models.language_model import language_model
from meshpar.explain.report import explain
from meshpar.layouts.plan import HOST_MEMORY

_GB, _BILLION = 1e9, 1e9
_MEMORY_GB = 32 * 2**30 / _GB
"""Memory of a V100, as in the paper."""

_WIDE = DecoderConfig(
    vocab=51_200,
    length=1024,
    embed=4096,
    heads=32,
    kv_heads=32,
    mlp=16_384,
    **GPT2_KIND,
)
_SMALL = DecoderConfig(vocab=256, length=32, depth=4, embed=64, mlp=256)
_MACHINE = "v5p:2x2x1"
_NONE, _OPTIMIZER = "none", "optimizer"
_WEIGHTS = "optimizer+parameters"
_ALL = "optimizer+parameters+activations"
_OFFLOADS = _NONE, _OPTIMIZER, _WEIGHTS, _ALL
_DEPTHS = 4, 16, 32, 64
_SEQUENCES, _LARGEST, _EQUAL = 8, 13.0, 1e-6
"""Of a batch; billions of parameters that shall fit; bound of relative errors."""


def _program(
    config: DecoderConfig,
    layout: str,
    devices: list[jax.Device],
    dtype: jnp.dtype | None = jnp.bfloat16,
) -> meshpar.TrainProgram:
    tokens = jax.ShapeDtypeStruct((_SEQUENCES, config.length), jnp.int32)
    return meshpar.lower(
        language_model(config),
        optax.adam(1e-4),
        layout,
        {"tokens": tokens, "targets": tokens},
        devices=devices,
        compute_dtype=dtype,
        lowering="shard_map",
    )


def peak(depth: int, offload: str) -> tuple[float, float]:
    """(billions of parameters, predicted GB) of a deep decoder on one device."""
    config = dataclasses.replace(_WIDE, depth=depth)
    layout = f"zero=3,remat=full,offload={offload}"
    program = _program(config, layout, jax.devices()[:1])
    size = sum(param.size for param in program.model.params.values())
    return size / _BILLION, program.lowering.memory(program.abstract_batch).total / _GB


def deepest(
    offload: str, depths: Sequence[int]
) -> tuple[int, dict[int, tuple[float, float]]]:
    """The deepest decoder that fits; that one layer more does not is tried.

    Args:
      offload: parts of the state in host memory.
      depths: two or more, which are tried first.

    Returns:
      (its layers, {layers: `peak`} of all that were tried).
    """
    tried = {depth: peak(depth, offload) for depth in depths}

    def size(depth: int) -> float:
        if depth not in tried:
            tried[depth] = peak(depth, offload)
        return tried[depth][1]

    before, depth = depths[:2]
    while True:  # The secant through the last two.
        layer = (size(depth) - size(before)) / (depth - before)
        following = depth + math.floor((_MEMORY_GB - size(depth)) / layer)
        if following in tried:
            break
        before, depth = depth, following
    while size(depth + 1) <= _MEMORY_GB:
        depth += 1
    while size(depth) > _MEMORY_GB:
        depth -= 1
    return depth, tried


def losses(offload: str, steps: int) -> np.ndarray:
    """Losses [steps] of a small decoder on two devices, in float32."""
    layout = f"fsdp=2,zero=3,remat=full,offload={offload}"
    program = _program(_SMALL, layout, jax.devices()[:2], None)
    draws, state, found = np.random.default_rng(0), program.init(0), []
    for _ in range(steps):
        ids = draws.integers(0, _SMALL.vocab, (_SEQUENCES, _SMALL.length + 1), np.int32)
        batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
        state, metrics = program.step(state, batch)
        found.append(float(metrics["loss"]))
    return np.array(found)


def state_bytes(offload: str) -> dict[str, float]:
    """{memory: bytes per parameter} of the state on two devices after a step.

    Counted in the arrays themselves; the small decoder, in float32, with Adam.
    """
    program = _program(
        _SMALL, f"fsdp=2,zero=3,remat=full,offload={offload}", jax.devices()[:2], None
    )
    ids = np.zeros((_SEQUENCES, _SMALL.length), np.int32)
    state, _ = program.step(program.init(0), {"tokens": ids, "targets": ids})
    stack = program.model.layered.split(program.model.params)[1]
    count = sum(math.prod(param.shape) for param in stack.values())
    found = {"host": 0.0, "device": 0.0}
    for path, x in jax.tree.leaves_with_path(state):
        # Layers alone: embedding and head are updated on the device.
        if x.shape[:1] == (_SMALL.depth,) and path is not None:
            memory = "host" if x.sharding.memory_kind == HOST_MEMORY else "device"
            found[memory] += sum(s.data.nbytes for s in x.addressable_shards)
    return {memory: size / count for memory, size in found.items()}


def measured_claim() -> Claim:
    """Whether the arrays of the layers live where `offload=` says."""
    found = {offload: state_bytes(offload) for offload in (_NONE, _OPTIMIZER, _WEIGHTS)}
    wanted = {_NONE: (0, 12), _OPTIMIZER: (8, 4), _WEIGHTS: (12, 0)}
    return Claim(
        "bytes of a layer's parameter in host memory after a step, counted in arrays",
        "8 of Adam's moments, and 4 of the weight",
        ", ".join(f"{x['host']:.2f} ({name})" for name, x in found.items()),
        all(
            abs(found[name]["host"] - host) < 0.01
            and abs(found[name]["device"] - device) < 0.01
            for name, (host, device) in wanted.items()
        ),
    )


def compiled_gb(depth: int, offload: str) -> tuple[float, float]:
    """(peak, prediction) in GB of a deep decoder, compiled for one chip."""
    config = dataclasses.replace(_WIDE, depth=depth)
    chip = list(meshpar.mesh.topology(_MACHINE))[:1]
    found = explain(_program(config, f"zero=3,remat=full,offload={offload}", chip))
    return found.compiled_bytes["peak"] / _GB, found.predicted.total / _GB


def claims_of(sizes: dict[str, float], curves: dict[str, np.ndarray]) -> list[Claim]:
    """Whether larger models fit, and train as they would without.

    Args:
      sizes: {offload: billions of parameters that fit}.
      curves: {offload: losses by step}.
    """
    plain, most = sizes[_NONE], max(sizes.values())
    worst = max(float(np.abs(x / curves[_NONE] - 1).max()) for x in curves.values())
    steps = len(curves[_NONE])
    return [
        Claim(
            f"{_LARGEST:.0f} billion parameters fit into 32 GiB, as predicted",
            "10 times larger: 13 billion parameters",
            f"{plain:.1f} to {most:.1f} billion, {most / plain:.1f} times",
            # Without, 16 bytes a parameter and little more: 2 billion at most.
            most >= _LARGEST and 0.8 < plain * 16 / _MEMORY_GB <= 1,
        ),
        Claim(
            f"{steps} losses with offload are those without, to 1e-6",
            "the same training",
            f"{worst:.1e} off",
            worst <= _EQUAL,
        ),
    ]


def _compiled_claim(billions: float, compiled: float, predicted: float) -> Claim:
    return Claim(
        f"{billions:.1f} billion parameters, compiled for one chip of v5p: GB at the "
        "peak",
        f"at most {_MEMORY_GB:.1f}, and 10% off the prediction",
        f"{compiled:.2f}, predicted {predicted:.2f}",
        compiled <= _MEMORY_GB and abs(compiled / predicted - 1) < 0.1,
    )


def _run(setting: Setting) -> Result:
    sizes, curves, memory = {}, {}, {}
    depths = _DEPTHS[:2] if setting.quick else _DEPTHS
    for index, offload in enumerate(_OFFLOADS):
        setting.progress(f"offload={offload}", index / 8)
        depth, tried = deepest(offload, depths)
        sizes[offload], memory[offload] = tried[depth][0], sorted(tried.values())
        curves[offload] = losses(offload, 3 if setting.quick else 10)
    claims = claims_of(sizes, curves)
    claims.append(measured_claim())
    if not setting.quick:
        setting.progress(f"compiles for {_MACHINE}", 0.5)
        claims.append(_compiled_claim(sizes[_ALL], *compiled_gb(depth, _ALL)))

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        for offload, points in memory.items():
            axes.plot(*zip(*points, strict=True), "o-", label=f"offload={offload}")
        axes.axhline(_MEMORY_GB, color="black", linestyle=":", label="memory of a V100")
        axes.set(
            xlabel="billion parameters",
            ylabel="predicted GB on the device",
            ylim=(0, 2 * _MEMORY_GB),
        )
        figure.legend(loc="outside upper center", ncols=2)

    return Result(
        ("offload", "billion parameters that fit"),
        tuple((offload, f"{size:.2f}") for offload, size in sizes.items()),
        tuple(claims),
        {"fitting": sizes, "memory": memory, "losses": curves},
        draw,
    )


PAPER = Paper(
    name="host_memory",
    title="Training state in host memory",
    source="Ren et al., ZeRO-Offload, USENIX ATC 2021, arXiv:2101.06840, abstract; Cui "
    "et al., GeePS, EuroSys 2016, section 3",
    shows="predicted memory of one device over the size of a GPT, with parts of the "
    "training state in host memory",
    run=_run,
)
