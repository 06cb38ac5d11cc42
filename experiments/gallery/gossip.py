"""Gossip: how fast replicas agree along a ring and along an exponential graph."""

import math

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
from jax.sharding import PartitionSpec

import meshpar
from experiments.gallery.paper import Claim, Paper, Result, Setting
from meshpar.contracts.hlo import parse_hlo
from meshpar.local_sgd.gossip import Gossip, mix_with_neighbours

_GRAPHS = ("ring", "exponential")
_DEVICES, _NUMBERS, _SHOWN = 8, 32, 40


def distances(graph: str, replicas: int, rounds: int) -> list[float]:
    """Largest distance to the mean after each round; it is 1 at the start."""
    matrices = Gossip(graph).rounds(replicas)
    x = np.random.default_rng(0).normal(size=replicas)
    x -= x.mean()
    x /= np.abs(x).max()
    found = [1.0]
    for index in range(rounds):
        x = matrices[index % len(matrices)] @ x
        found.append(float(np.abs(x - x.mean()).max()))
    return found


def ring_rate(replicas: int) -> float:
    """The factor of a round on the ring, in closed form: that of the slowest wave.

    The mean of three neighbours multiplies the wave cos(2 pi i / R) by
    (1 + 2 cos(2 pi / R)) / 3 = 1 - O(1 / R^2).
    """
    return (1 + 2 * math.cos(2 * math.pi / replicas)) / 3


def measured_rate(curve: list[float]) -> float:
    """The factor of a round over the last half of the rounds of `distances`."""
    half = len(curve) // 2
    return (curve[-1] / curve[half]) ** (1 / (len(curve) - 1 - half))


def ring_on_devices(rounds: int = 20) -> float:
    """The factor of a round on a ring of 8 devices, from runs of a compiled program.

    It runs three times, and the last two runs give the factor.
    """
    mix, x = _compiled(Gossip("ring").rounds(_DEVICES) * rounds)
    sizes = []
    for _ in range(3):
        x = mix(x)
        sizes.append(float(jnp.linalg.norm(x - x.mean(0, keepdims=True))))
    return (sizes[2] / sizes[1]) ** (1 / rounds)


def _log2(replicas: int) -> int:
    """log2 of a power of 2."""
    return replicas.bit_length() - 1


def mixed_on_devices() -> tuple[float, dict[str, int]]:
    """log2(R) rounds of the exponential graph in one program on 8 devices.

    Returns:
      (largest distance to the mean, {kind of collective: number in the program}).
    """
    compiled, x = _compiled(Gossip("exponential").rounds(_DEVICES))
    kinds: dict[str, int] = {}
    for collective in parse_hlo(compiled.as_text(), {"replica": _DEVICES}):
        count = kinds.get(collective.kind, 0) + collective.executions
        kinds[collective.kind] = count
    return float(jnp.abs(compiled(x) - x.mean(0, keepdims=True)).max()), kinds


def _compiled(matrices: list[np.ndarray]) -> tuple[jax.stages.Compiled, jax.Array]:
    """(program of all rounds on 8 devices, its input [devices, numbers])."""
    layout = meshpar.layouts.parse(f"replica={_DEVICES}")
    mesh = meshpar.mesh.make_mesh(layout, jax.devices()[:_DEVICES])
    wire = meshpar.collectives.make_compression("f32")
    spec = PartitionSpec("replica")

    def run(x: jax.Array) -> jax.Array:
        for matrix in matrices:
            x = mix_with_neighbours(x[0], matrix, "replica", wire)[None]
        return x

    mix = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))
    x = jax.random.normal(jax.random.key(0), (_DEVICES, _NUMBERS))
    x = jax.device_put(x, jax.NamedSharding(mesh, spec))
    return mix.lower(x).compile(), x


def _claims(
    found: dict[str, dict[int, list[float]]],
    error: float,
    kinds: dict[str, int],
    on_devices: float,
) -> tuple[Claim, ...]:
    rates = {size: measured_rate(curve) for size, curve in found["ring"].items()}
    off = max(abs(rate / ring_rate(size) - 1) for size, rate in rates.items())
    wanted = ring_rate(_DEVICES)
    exact = max(curve[_log2(size)] for size, curve in found["exponential"].items())
    late = min(curve[_log2(size)] for size, curve in found["ring"].items())
    return (
        Claim(
            "the exponential graph averages exactly in log2 R rounds",
            "exact",
            f"{exact:.0e} of the start",
            exact < 1e-12,
        ),
        Claim(
            "the ring does not",
            "1 - O(1/R^2) a round",
            f"{late:.2f} of the start",
            late > 0.05,
        ),
        Claim(
            "a round on the ring shrinks the distance by (1 + 2 cos(2 pi / R)) / 3",
            "1 - O(1/R^2) a round",
            ", ".join(f"{rate:.4f} (R={size})" for size, rate in rates.items()),
            off < 1e-3,
        ),
        Claim(
            f"so does a compiled ring of {_DEVICES} devices, as measured",
            f"{wanted:.4f}",
            f"{on_devices:.4f}",
            abs(on_devices / wanted - 1) < 1e-3,
        ),
        Claim(
            f"the compiled program on {_DEVICES} devices finds the mean",
            "",
            f"{error:.0e} off",
            error < 1e-6,
        ),
        Claim(
            "only neighbours communicate: its collectives are permutes, one a round",
            "one message a round",
            ", ".join(f"{count} x {kind}" for kind, count in kinds.items()),
            kinds == {"permute": 3},
        ),
    )


def _run(setting: Setting) -> Result:
    sizes = (8, 32) if setting.quick else (8, 16, 32, 64)
    found: dict[str, dict[int, list[float]]] = {graph: {} for graph in _GRAPHS}
    for graph in _GRAPHS:
        for index, size in enumerate(sizes):
            setting.progress(f"{graph} of {size}", index / len(sizes) / 2)
            found[graph][size] = distances(graph, size, size**2 // 2)
    setting.progress("the compiled program", 0.8)
    error, kinds = mixed_on_devices()
    on_devices = ring_on_devices()
    needed = {
        graph: {size: _rounds_to(by_size[size], 1e-3) for size in sizes}
        for graph, by_size in found.items()
    }
    rows = [
        (str(size), *(needed[graph][size] for graph in _GRAPHS), str(_log2(size)))
        for size in sizes
    ]

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        for graph, style in zip(_GRAPHS, ("o-", "s--"), strict=True):
            for size, curve in found[graph].items():
                shown = [max(distance, 1e-8) for distance in curve[:_SHOWN]]
                axes.plot(shown, style, markersize=3, label=f"{graph}, R={size}")
        axes.set(yscale="log", xlabel="rounds", ylabel="distance to the mean")
        axes.legend(fontsize=8, ncols=2)

    return Result(
        ("replicas", "rounds to 1e-3, ring", "exponential", "log2 R"),
        tuple(rows),
        _claims(found, error, kinds, on_devices),
        {
            "distances": {
                graph: {size: curve[: _SHOWN + 1] for size, curve in by_size.items()}
                for graph, by_size in found.items()
            },
            "collectives": kinds,
            "error": error,
            "ring_on_devices": on_devices,
        },
        draw,
    )


def _rounds_to(curve: list[float], goal: float) -> str:
    """The first round at a distance, or that there is none among those that ran."""
    found = next((i for i, distance in enumerate(curve) if distance <= goal), None)
    return f"more than {len(curve) - 1}" if found is None else str(found)


PAPER = Paper(
    name="gossip",
    title="Gossip on a ring and on an exponential graph",
    source="Lian et al., NeurIPS 2017, arXiv:1705.09056; Ying et al., NeurIPS 2021, "
    "arXiv:2110.13363",
    shows="distance of the replicas to their mean over rounds",
    run=_run,
)
