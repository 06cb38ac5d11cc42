"""DistBelief and AlexNet on two GPUs: layers split with cross-talk at some of them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import meshpar
from experiments.gallery import partitioned
from experiments.gallery.paper import Claim, Paper, Result, Setting
from experiments.gallery.partitioned import Convolution, Layer, LocallyConnected
from meshpar.contracts.contract import Contract
from meshpar.contracts.hlo import parse_hlo
from meshpar.layouts.axes import TENSOR
from meshpar.mesh.chips import CHIPS

_CHIP = CHIPS["v5e"]
_MACHINES = (1, 2, 4, 8, 16, 32)
_SIZES = {20: "88M", 40: "340M", 90: "1.7B"}
"""{maps: parameters} of three networks, near the paper's 80M, 330M and 1.7B."""

_SIDE, _WINDOW, _PICTURES = 64, 5, 100
_PASSES = 3
"""Times that a step moves a weight or its gradient through memory."""


def network(maps: int) -> tuple[Layer, ...]:
    """Three locally connected layers, with cross-talk before the last two."""
    sizes = ((3, maps, False), (maps, maps, True), (maps, maps, True))
    return tuple(
        LocallyConnected(f"layer {i + 1}", before, after, _WINDOW, cross, _SIDE)
        for i, (before, after, cross) in enumerate(sizes)
    )


def alexnet(cross: Sequence[str]) -> tuple[Layer, ...]:
    """The convolutions of AlexNet after pooling, with cross-talk before some."""
    sizes = (("conv2", 96, 256, 5, 27), ("conv3", 256, 384, 3, 13))
    sizes += (("conv4", 384, 384, 3, 13), ("conv5", 384, 256, 3, 13))
    return tuple(
        Convolution(name, before, after, window, name in cross, side)
        for name, before, after, window, side in sizes
    )


def contract(layers: Sequence[Layer], pictures: int, n: int) -> Contract:
    """The collectives of a step: those of layers with cross-talk, and no other."""
    terms = (term for layer in layers for term in layer.declared(pictures, n, TENSOR))
    return Contract(tuple(terms))


def step_seconds(layers: Sequence[Layer], pictures: int, n: int) -> float:
    """Predicted seconds of a step: compute or memory, and then the declared bytes."""
    flops = sum(layer.flops(pictures, n) for layer in layers)
    weights = sum(math.prod(layer.weight_shape(n)) for layer in layers) * 4 / n
    work = max(flops / _CHIP.peak_flops, _PASSES * weights / _CHIP.memory_bandwidth)
    wire = contract(layers, pictures, n).wire_bytes if n > 1 else 0.0
    return work + wire / _CHIP.link_bandwidth


class Checked(NamedTuple):
    """A network on 8 devices against one.

    Attributes:
      error: largest relative error of a gradient.
      violations: of the contract, by the compiled program.
      collectives: number of collectives in the compiled program.
    """

    error: float
    violations: list[str]
    collectives: int


def check(layers: Sequence[Layer], declared: Sequence[Layer] = ()) -> Checked:
    """Compiles a step on 8 devices, and compares gradients and contract.

    Args:
      layers: the network.
      declared: a network whose contract is checked instead.
    """
    n, pictures, draws = 8, 2, np.random.default_rng(0)
    mesh = meshpar.mesh.make_mesh(
        meshpar.layouts.parse(f"{TENSOR}={n}"), jax.devices()[:n]
    )
    shapes = [layer.weight_shape(n) for layer in layers]
    weights = [draws.normal(size=s).astype(np.float32) / s[-2] for s in shapes]
    first = layers[0]
    shape = (pictures, first.side, first.side, first.maps_in)
    x = draws.normal(size=shape).astype(np.float32)
    whole = isinstance(first, Convolution)
    spec = PartitionSpec() if whole else PartitionSpec(None, TENSOR)
    specs = [layer.weight_spec(TENSOR) for layer in layers]

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        return jnp.square(partitioned.run(layers, x, weights, TENSOR)).sum()

    gradient = jax.shard_map(
        jax.grad(loss), mesh=mesh, in_specs=(specs, spec), out_specs=specs
    )
    placed = [
        jax.device_put(w, NamedSharding(mesh, s))
        for w, s in zip(weights, specs, strict=True)
    ]
    x_placed = jax.device_put(x, NamedSharding(mesh, spec))
    compiled = jax.jit(gradient).lower(placed, x_placed).compile()
    expected = jax.jit(
        jax.grad(
            lambda weights: jnp.square(
                partitioned.run_whole(layers, x, weights, n)
            ).sum()
        )
    )(weights)
    pairs = zip(compiled(placed, x_placed), expected, strict=True)
    error = max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)
    found = parse_hlo(compiled.as_text(), dict(mesh.shape))
    terms = contract(declared or layers, pictures, n)
    return Checked(error, terms.violations(found), sum(c.executions for c in found))


def small_networks() -> dict[str, tuple[Layer, ...]]:
    """{name: a network of its kind that compiles quickly}."""
    local = [(3, 4, False), (4, 4, True), (4, 4, False), (4, 4, True)]
    convolutions = [(3, 16, False), (16, 16, False), (16, 16, True), (16, 16, False)]
    return {
        "locally connected": tuple(
            LocallyConnected(f"layer {i}", *sizes[:2], 3, sizes[2], 16)
            for i, sizes in enumerate(local)
        ),
        "grouped convolutions": tuple(
            Convolution(f"conv{i}", *sizes[:2], 3, sizes[2], 8, reads_picture=i == 0)
            for i, sizes in enumerate(convolutions)
        ),
    }


def _claims(
    checked: dict[str, Checked], speedups: dict[str, dict[int, float]], saved: float
) -> tuple[Claim, ...]:
    ends = {size: by_n[max(_MACHINES)] for size, by_n in speedups.items()}
    gains = list(ends.values())
    equal = [
        Claim(
            f"{name}: 8 devices equal one, to 1e-6",
            "",
            f"{found.error:.1e}",
            found.error < 1e-6,
        )
        for name, found in checked.items()
    ]
    kept = [
        Claim(
            f"{name}: collectives at the chosen layers only",
            "cross-talk at chosen layers",
            f"{found.collectives} as declared" if not found.violations else "violated",
            not found.violations,
        )
        for name, found in checked.items()
    ]
    return (
        *equal,
        *kept,
        Claim(
            "larger models gain more from machines",
            "1.7B: more than 12 times on 81 machines; small models stop early",
            ", ".join(f"{size}: {gain:.1f} times" for size, gain in ends.items()),
            gains == sorted(gains) and gains[-1] > 2 * gains[0],
        ),
        Claim(
            "AlexNet's choice, conv3 alone, moves fewer bytes than all layers",
            "conv2, conv4 and conv5 read maps of their own GPU",
            f"{saved:.1f} times fewer",
            saved > 2,
        ),
    )


def _run(setting: Setting) -> Result:
    checked = {}
    for index, (name, layers) in enumerate(small_networks().items()):
        setting.progress(name, index / 3)
        checked[name] = check(layers)
    setting.progress("speedups", 0.9)
    speedups = {
        size: {
            n: step_seconds(network(maps), _PICTURES, 1)
            / step_seconds(network(maps), _PICTURES, n)
            for n in _MACHINES
        }
        for maps, size in _SIZES.items()
    }
    names = [layer.name for layer in alexnet(())]
    everywhere, chosen = (
        contract(alexnet(cross), 128, 2).wire_bytes for cross in (names, ["conv3"])
    )
    rows = [
        (size, *(f"{by_n[n]:.1f}" for n in _MACHINES))
        for size, by_n in speedups.items()
    ]

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        for size, by_n in speedups.items():
            axes.plot(_MACHINES, list(by_n.values()), "o-", label=f"{size} parameters")
        axes.set(xlabel=f"machines ({_CHIP.name} chips)", ylabel="predicted speedup")
        axes.set(xticks=_MACHINES, ylim=0)
        axes.legend()

    return Result(
        ("parameters", *(f"speedup, {n}" for n in _MACHINES)),
        tuple(rows),
        _claims(checked, speedups, everywhere / chosen),
        {
            "speedups": speedups,
            "alexnet_bytes": {"everywhere": everywhere, "conv3": chosen},
            "errors": {name: found.error for name, found in checked.items()},
        },
        draw,
    )


PAPER = Paper(
    name="model_parallel",
    title="Partitioned layers with cross-talk where it is needed",
    source="Dean et al., DistBelief, NeurIPS 2012, section 3 and figure 3; "
    "Krizhevsky et al., NeurIPS 2012, section 3.5",
    shows="predicted speedup of three locally connected networks over machines, from "
    "their contracts and a chip's figures",
    run=_run,
)
