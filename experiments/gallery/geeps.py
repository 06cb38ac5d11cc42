"""GeePS: layers come from host memory ahead of their use, in a compiled program."""

import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.figure
import optax
from flax import nnx

import meshpar
from experiments.gallery.paper import Claim, Paper, Result, Setting
from meshpar.contracts.host_transfers import host_transfers

_WIDTH, _HIDDEN, _ROWS = 1024, 8192, 8192
_DEPTH, _DEEP, _CHIPS = 6, 10, 4
"""Sizes of which no stack of layers fits into the 128 MiB on a chip of v5e."""

_MACHINE, _MB = "v5e:2x2", 1e6
_NONE, _ALL = "none", "optimizer+parameters+activations"

_WEIGHTS = 4 * 2 * _WIDTH * _HIDDEN
"""Bytes of a layer's float32 weights; its momentum and its gradient have as many."""

_ACTIVATIONS = 4 * _ROWS * _WIDTH
"""Bytes of a chip's input of a layer, which is all that rematerialization saves."""


class _Layer(nnx.Module):
    """Two matmuls beside a residual stream."""

    def __init__(self, rngs: nnx.Rngs):
        def matrix(rows: int, columns: int, names: tuple[str, str]) -> nnx.Param:
            x = rngs.params.normal((rows, columns)) * rows**-0.5
            return nnx.Param(x, out_sharding=names)

        self.up = matrix(_WIDTH, _HIDDEN, ("embed", "mlp"))
        self.down = matrix(_HIDDEN, _WIDTH, ("mlp", "embed"))

    def __call__(self, x: Any) -> Any:
        return x + nnx.relu(x @ self.up[...]) @ self.down[...]


class _Net(nnx.Module):
    """A stack of layers, without embedding and head."""

    def __init__(self, rngs: nnx.Rngs, depth: int):
        stacked = nnx.vmap(_Layer, transform_metadata={nnx.PARTITION_NAME: "layers"})
        self.layers = stacked(rngs.split(depth))


def program(depth: int, offload: str, chips: int = 1) -> meshpar.TrainProgram:
    """A step for TPUs that need not be present; nothing is compiled yet.

    Several chips hold parts of the weights, and fetch those of the next layer ahead.
    """
    stack = meshpar.LayerStack(
        stack="layers",
        embed=lambda net, batch: batch["x"],
        layer=lambda layer, x: layer(x),
        head_loss=lambda net, x, batch: jnp.square(x).mean(),
    )
    ahead = f"fsdp={chips},prefetch=layers" if chips > 1 else "fsdp=1"
    return meshpar.lower(
        meshpar.from_nnx(functools.partial(_Net, depth=depth), stack),
        optax.sgd(0.1, 0.9),
        f"{ahead},zero=3,remat=full,offload={offload}",
        {"x": jax.ShapeDtypeStruct((_ROWS * chips, _WIDTH), jnp.float32)},
        devices=list(meshpar.mesh.topology(_MACHINE))[:chips],
        lowering="shard_map",
    )


class Compiled(NamedTuple):
    """A compiled step.

    Attributes:
      text: its program.
      device: bytes at the peak, without what is in host memory between steps; at most,
        as the compiler counts there what a step itself puts into host memory.
      to_device: bytes from host memory.
      to_host: bytes to it.
    """

    text: str
    device: int
    to_device: int
    to_host: int


def compiled(depth: int, offload: str, chips: int = 1) -> Compiled:
    """Compiles a step for the chips."""
    step = program(depth, offload, chips).compiled
    text, sizes = step.as_text(), step.memory_analysis()
    moved = host_transfers(text)
    device = sizes.peak_memory_in_bytes - sizes.host_argument_size_in_bytes
    return Compiled(text, device, moved.to_device, moved.to_host)


def wanted_bytes(depth: int, chips: int = 1) -> tuple[int, int]:
    """(to a device, to the host) of a step in which all is moved layer by layer.

    Forward and backward pass bring the weights of each layer, and several chips those
    of one layer more, which are fetched ahead. The update brings weights and momentum,
    and returns them.
    """
    update = 2 * depth * _WEIGHTS // chips
    passes = 2 * (depth + (chips > 1)) * _WEIGHTS // chips
    saved = depth * _ACTIVATIONS
    return update + passes + saved, update + saved


def bytes_claim(found: Compiled, depth: int, chips: int = 1) -> Claim:
    """Whether the compiled program moves these bytes."""
    wanted = wanted_bytes(depth, chips)
    off = max(abs(found.to_device / wanted[0] - 1), abs(found.to_host / wanted[1] - 1))
    return Claim(
        f"MB of {depth} layers to and from one of {chips} chips, compiled for v5e, "
        "within 1%",
        "read and written per layer: parameters, intermediate data, updates; by "
        f"formula {wanted[0] / _MB:.0f}, {wanted[1] / _MB:.0f}",
        f"{found.to_device / _MB:.0f}, {found.to_host / _MB:.0f}",
        off < 0.01,
    )


def quick_claims() -> list[Claim]:
    """The bytes that one chip moves, compiled once."""
    return [bytes_claim(compiled(_DEPTH, _ALL), _DEPTH)]


_INSTRUCTION = re.compile(r"%?([\w.-]+) = .*? ([\w-]+)\((?:%?([\w.-]+))?")
_SLICE = re.compile(r" = f32\[1,(\d+),(\d+)\]")


def _computations(text: str) -> dict[str, list[str]]:
    """{computation: its instructions, in the order of the schedule}, but the entry."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if line.endswith("{") and " = " not in line.split("(")[0]:
            name = "" if line.startswith("ENTRY") else line.lstrip("%").split(" ")[0]
            if name:
                found[name] = []
        elif line.startswith("  ") and name:
            found[name].append(line.strip().removeprefix("ROOT "))
    return found


def matmuls_beside(text: str) -> list[int]:
    """Matmuls of a loop's body that run while each of its weights is on the way.

    Only loops with matmuls count, the forward and the backward pass. A transfer lasts
    from its start to its done, in the order of the schedule.
    """
    bodies = _computations(text)
    multiplies = {
        name
        for name, lines in bodies.items()
        if any(" convolution(" in line or " dot(" in line for line in lines)
    }
    found = []
    for lines in bodies.values():
        works = []
        starts: dict[str, int] = {}
        for place, line in enumerate(lines):
            match = _INSTRUCTION.match(line)
            calls = re.search(r"calls=%?([\w.-]+)", line)
            works.append(bool(calls and calls.group(1) in multiplies))
            if not match:
                continue
            name, kind, operand = match.groups()
            on_host = "S(5)" in line.split(" dynamic-slice-start")[0]
            if kind == "dynamic-slice-start" and on_host:
                starts[name] = place
            shape = _SLICE.search(line)
            if kind == "dynamic-slice-done" and operand in starts and shape:
                if 8 * _CHIPS * math.prod(map(int, shape.groups())) == _WEIGHTS:
                    found.append((starts[operand], place, works))
    return [sum(works[a:b]) for a, b, works in found if any(works)]


def ahead_claim(found: Compiled) -> Claim:
    """Whether weights are on the way while the layer before theirs computes."""
    beside = matmuls_beside(found.text)
    return Claim(
        "matmuls of a pass that run while the next layer's weights are on the way, for "
        "each matrix of the forward and of the backward pass",
        "background threads move data before the layer needs it (section 4.3)",
        ", ".join(map(str, beside)) or "none",
        len(beside) == 4 and min(beside) >= 1,
    )


def growth_claims(sizes: dict[tuple[str, int], int]) -> list[Claim]:
    """Whether the memory of the chip grows by a layer as the formulas say.

    Args:
      sizes: {(offload, layers): bytes of the chip's memory}.
    """
    grown = {
        name: (sizes[name, _DEEP] - sizes[name, _DEPTH]) / (_DEEP - _DEPTH) / _MB
        for name in (_NONE, _ALL)
    }
    # Weights, momentum, gradients and saved inputs; or gradients, and the saved inputs
    # that the compiler counts where they are in host memory.
    whole, least = 3 * _WEIGHTS + _ACTIVATIONS, _WEIGHTS
    most = least + _ACTIVATIONS
    texts = f"{whole / _MB:.0f}, and {least / _MB:.0f} to {most / _MB:.0f}"
    return [
        Claim(
            "MB that a layer more takes at the peak, compiled: within 10% of formula",
            "GPU memory holds a part, host memory the rest (section 4.3); by formula "
            + texts,
            ", ".join(f"{x:.0f} (offload={name})" for name, x in grown.items()),
            abs(grown[_NONE] * _MB / whole - 1) < 0.1
            and 0.9 * least < grown[_ALL] * _MB < 1.1 * most,
        )
    ]


def _run(setting: Setting) -> Result:
    setting.progress(f"compiles for {_MACHINE}", 0.0)
    found = {(_ALL, _DEPTH): compiled(_DEPTH, _ALL)}
    claims = [bytes_claim(found[_ALL, _DEPTH], _DEPTH)]
    if not setting.quick:
        cases = (_ALL, _DEEP), (_NONE, _DEPTH), (_NONE, _DEEP)
        for index, (offload, depth) in enumerate(cases):
            setting.progress(f"compiles {depth} layers", (1 + index) / 5)
            found[offload, depth] = compiled(depth, offload)
        claims += growth_claims({case: x.device for case, x in found.items()})
        setting.progress(f"compiles for {_CHIPS} chips", 0.8)
        ahead = compiled(_DEPTH, _ALL, _CHIPS)
        claims += [bytes_claim(ahead, _DEPTH, _CHIPS), ahead_claim(ahead)]

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        for name in (_NONE, _ALL):
            depths = [depth for offload, depth in found if offload == name]
            values = [found[name, depth].device / _MB for depth in depths]
            axes.plot(depths, values, "o-", label=f"offload={name}")
        axes.set(xlabel="layers", ylabel="MB at the peak, compiled", ylim=0)
        axes.legend()

    rows = [
        (
            name,
            str(depth),
            *(f"{x / _MB:.0f}" for x in (c.device, c.to_device, c.to_host)),
        )
        for (name, depth), c in found.items()
    ]
    return Result(
        ("offload", "layers", "MB at the peak", "MB from the host", "MB to the host"),
        tuple(rows),
        tuple(claims),
        {f"{name}, {depth}": c._replace(text="") for (name, depth), c in found.items()},
        draw,
    )


PAPER = Paper(
    name="geeps",
    title="GeePS: layers come from host memory ahead of their use",
    source="Cui et al., EuroSys 2016, sections 3 and 4.3",
    shows="memory of one chip over the layers of a model, compiled with its parameters "
    "and intermediate data on the chip and in host memory; nothing is run",
    run=_run,
)
