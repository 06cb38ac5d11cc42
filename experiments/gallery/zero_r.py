"""ZeRO-R: split checkpoints, buffers of one size, and packed temporaries, compiled."""

import functools
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
from flax import nnx

import meshpar
from experiments.gallery.paper import Claim, Paper, Result, Setting
from meshpar import layouts
from meshpar.contracts.hlo import parse_hlo
from meshpar.layouts.axes import AXES

_WIDTH, _HIDDEN, _LENGTH, _ROWS = 64, 128, 256, 8
_TENSOR, _DEPTHS, _FSDP = 4, (4, 12), 8
_WHOLE = "activations.residual_length=none"
_ITEM = 4
_CHAINS = (
    (256, 300, 640, 128, 512, 96, 256),
    (64, 512, 64, 512, 64),
    (128, 640, 320, 160, 80, 40, 400, 200),
)
"""Widths of matmuls in a row, of sizes that do not fit into each other's places."""


class _Layer(nnx.Module):
    """Two matmuls beside a residual stream, which a layout may split."""

    def __init__(self, rngs: nnx.Rngs):
        def matrix(size: tuple[int, int], names: tuple[str, str]) -> nnx.Param:
            x = rngs.params.normal(size) * size[0] ** -0.5
            return nnx.Param(x, out_sharding=names)

        self.up = matrix((_WIDTH, _HIDDEN), ("embed", "mlp"))
        self.down = matrix((_HIDDEN, _WIDTH), ("mlp", "embed"))

    def __call__(self, x_BLD: Any) -> Any:
        h_BLF = nnx.relu(x_BLD @ self.up[...])
        return _stream(x_BLD + h_BLF @ self.down[...])


def _stream(x_BLD: Any) -> Any:
    return layouts.constrain(x_BLD, "batch", "residual_length", "embed")


class _Net(nnx.Module):
    """A stack of layers, without embedding and head."""

    def __init__(self, rngs: nnx.Rngs, depth: int):
        stacked = nnx.vmap(_Layer, transform_metadata={nnx.PARTITION_NAME: "layers"})
        self.layers = stacked(rngs.split(depth))


def program(depth: int, layout: str) -> meshpar.TrainProgram:
    """A step on simulated devices."""
    stack = meshpar.LayerStack(
        stack="layers",
        embed=lambda net, batch: _stream(batch["x"]),
        layer=lambda layer, x: layer(x),
        head_loss=lambda net, x, batch: jnp.square(x).mean(),
    )
    count = layouts.parse(layout).num_devices
    return meshpar.lower(
        meshpar.from_nnx(functools.partial(_Net, depth=depth), stack),
        optax.sgd(0.1),
        layout,
        {"x": jax.ShapeDtypeStruct((_ROWS, _LENGTH, _WIDTH), jnp.float32)},
        devices=jax.devices()[:count],
        lowering="shard_map",
    )


def checkpoint_bytes(option: str) -> float:
    """Temporary bytes that a layer more takes, as compiled, with rematerialization."""
    layout = ",".join(filter(None, (f"tensor={_TENSOR},remat=full", option)))
    sizes = [
        program(depth, layout).compiled.memory_analysis().temp_size_in_bytes
        for depth in _DEPTHS
    ]
    return (sizes[1] - sizes[0]) / (_DEPTHS[1] - _DEPTHS[0])


def checkpoint_claims() -> tuple[list[Claim], dict[str, float]]:
    """Whether checkpoints of activations are split over `tensor`; and their bytes."""
    found = {"whole": checkpoint_bytes(_WHOLE), "split": checkpoint_bytes("")}
    # A layer more has its gradients too, which `tensor` splits either way.
    gradients = _ITEM * 2 * _WIDTH * _HIDDEN / _TENSOR
    whole = _ITEM * _ROWS * _LENGTH * _WIDTH
    saved = {name: size - gradients for name, size in found.items()}
    wanted = {"whole": whole, "split": whole / _TENSOR}
    off = max(abs(saved[name] / wanted[name] - 1) for name in wanted)
    texts = [f"{saved[name] / 1e3:.0f}" for name in wanted]
    claim = Claim(
        f"kB of a layer's checkpoint, compiled for tensor={_TENSOR}, whole and split: "
        "within 3% of formula",
        "P_a: activations over the model-parallel degree (section 6.1); by formula "
        + ", ".join(f"{x / 1e3:.0f}" for x in wanted.values()),
        ", ".join(texts),
        off < 0.03,
    )
    return [claim], saved


def buffers(depth: int) -> tuple[int, int]:
    """(largest payload of one collective, bytes of all of a step), as compiled."""
    step = program(depth, f"fsdp={_FSDP}")
    axes = {axis: step.mesh.shape[axis] for axis in AXES}
    found = list(parse_hlo(step.compiled.as_text(), axes))
    return (
        max(one.payload_bytes for one in found),
        sum(one.payload_bytes * one.executions for one in found),
    )


def buffer_claim() -> Claim:
    """Whether collectives of a deeper model are as large, and only more of them."""
    (small, few), (large, many) = map(buffers, _DEPTHS)
    return Claim(
        f"largest collective of {_DEPTHS[1]} layers over that of {_DEPTHS[0]}, and "
        "bytes of all",
        "C_B: buffers of one size, whatever the model's (section 6.2)",
        f"{large / small:.2f}, {many / few:.2f} times",
        large == small and abs(many / few / (_DEPTHS[1] / _DEPTHS[0]) - 1) < 0.05,
    )


_TYPE = re.compile(r"(f32|bf16|s32|u32|pred)\[([\d,]*)\]")
_LINE = re.compile(r"%?([\w.-]+) = (.*?) ([\w-]+)\((.*)$")
_NO_BYTES = ("parameter", "constant", "bitcast", "get-tuple-element", "tuple")
_ITEMS = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1}


def live_bytes(text: str) -> tuple[int, int]:
    """(least, most) bytes of temporaries alive at the peak of a straight program.

    A value lives from the instruction that makes it to the last that reads it. At most,
    it has a place of its own beside all that the instruction reads; at least, it takes
    the place of what is read there for the last time.

    Args:
      text: of a compiled program without loops, in the order of its schedule.
    """
    lines = text[text.index("ENTRY ") :].splitlines()[1:]
    values: dict[str, tuple[int, tuple[str, ...]]] = {}
    order, returned = [], set()
    for line in lines:
        match = _LINE.match(line.strip().removeprefix("ROOT "))
        if not match:
            break
        name, kind, opcode, rest = match.groups()
        operands = tuple(
            x
            for x in re.findall(r"%([\w.-]+)", rest.split("metadata")[0])
            if x in values
        )
        sizes = (
            _ITEMS[item] * math.prod(map(int, filter(None, dims.split(","))))
            for item, dims in _TYPE.findall(kind)
        )
        is_view = opcode in _NO_BYTES
        values[name] = (0 if is_view else sum(sizes), operands)
        order.append((name, is_view))
        if line.strip().startswith("ROOT "):
            returned = {name}
    last = {}
    sources = {}
    for place, (name, is_view) in enumerate(order):
        own = set().union(*(sources[x] for x in values[name][1]), set())
        sources[name] = own if is_view else {name}
        for source in own:
            last[source] = place
    kept = set().union(*(sources[name] for name in returned))
    least = most = now = 0
    for place, (name, _) in enumerate(order):
        size = 0 if name in kept else values[name][0]
        ends = sum(
            values[x][0] for x, at in last.items() if at == place and x not in kept
        )
        most = max(most, now + size)
        now += size - ends
        least = max(least, now)
    return least, most


def packing(widths: tuple[int, ...]) -> tuple[int, int, int, int]:
    """(least, most) live bytes, reserved bytes, and bytes of all, of a gradient."""

    def loss(weights: list, x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.square(x).mean()

    shapes = [
        jax.ShapeDtypeStruct(size, jnp.float32) for size in itertools.pairwise(widths)
    ]
    x = jax.ShapeDtypeStruct((512, widths[0]), jnp.float32)

    def norm(weights: list, x: jax.Array) -> jax.Array:
        """A number, so that no temporary takes the place of a result."""
        return optax.tree.norm(jax.grad(loss)(weights, x))

    step = jax.jit(norm).lower(shapes, x).compile()
    least, most = live_bytes(step.as_text())
    every = sum(_ITEM * 512 * width for width in widths[1:]) * 2
    return least, most, step.memory_analysis().temp_size_in_bytes, every


def packing_claim(found: list[tuple[int, int, int, int]]) -> Claim:
    """Whether an assignment reserves little more than what is alive at the peak."""
    shares = [reserved / least for least, _, reserved, _ in found]
    below = all(reserved <= most for _, most, reserved, _ in found)
    return Claim(
        f"bytes that {len(found)} compiled gradients reserve, over the least alive at "
        "the peak, by a loop over the schedule",
        "M_D: fragmentation can leave 30% unused (section 6.3); XLA packs in advance",
        ", ".join(f"{x:.3f}" for x in shares),
        below and min(shares) >= 1 and max(shares) < 1.1,
    )


def _run(setting: Setting) -> Result:
    setting.progress("compiles checkpoints", 0.0)
    claims, saved = checkpoint_claims()
    setting.progress("compiles collectives", 0.5)
    claims.append(buffer_claim())
    setting.progress("compiles gradients", 0.8)
    found = [packing(widths) for widths in _CHAINS]
    claims.append(packing_claim(found))

    def draw(figure: matplotlib.figure.Figure) -> None:
        left, right = figure.subplots(1, 2)
        left.bar(list(saved), [x / 1e3 for x in saved.values()])
        left.set(ylabel="kB of a layer's checkpoint", xlabel="over tensor=4")
        places = np.arange(len(found))
        for offset, index, label in ((-0.2, 0, "alive"), (0.2, 2, "reserved")):
            values = [row[index] / 1e6 for row in found]
            right.bar(places + offset, values, 0.4, label=label)
        right.set(xlabel="program", ylabel="MB of temporaries", xticks=places)
        right.legend()

    rows = [
        (str(i), *(f"{row[n] / 1e6:.3f}" for n in (0, 2, 3)))
        for i, row in enumerate(found)
    ]
    return Result(
        ("program", "MB alive", "MB reserved", "MB of all activations"),
        tuple(rows),
        tuple(claims),
        {"checkpoints": saved, "packing": found},
        draw,
    )


PAPER = Paper(
    name="zero_r",
    title="ZeRO-R: checkpoints, buffers and fragmentation",
    source="Rajbhandari et al., SC 2020, arXiv:1910.02054, section 6",
    shows="bytes of a layer's checkpoint, whole and split, and bytes of temporaries "
    "alive and reserved, in compiled programs",
    run=_run,
)
