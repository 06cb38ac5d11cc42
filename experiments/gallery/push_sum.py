"""Push-sum on directed graphs and asynchronous gossip: means kept, rates measured."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
from jax.sharding import PartitionSpec

import meshpar
from experiments.gallery.paper import Claim, Paper, Result, Setting
from meshpar.methods import push_sum

_DEVICES, _NUMBERS = 8, 32
_RING, _DIRECTED, _EXPONENTIAL = "ring", "directed ring", "exponential"
_RANDOM, _RANDOM_DIRECTED = "random", "random, directed"


def graphs(replicas: int, seed: int = 0) -> dict[str, np.ndarray]:
    """{name: graph} of the library."""
    return {
        _RING: push_sum.ring(replicas),
        _DIRECTED: push_sum.ring(replicas, directed=True),
        _EXPONENTIAL: push_sum.exponential(replicas),
        _RANDOM: push_sum.random_graph(replicas, 2, seed=seed),
        _RANDOM_DIRECTED: push_sum.random_graph(replicas, 2, directed=True, seed=seed),
    }


def second_eigenvalue(sends: np.ndarray) -> float:
    """The second largest magnitude of an eigenvalue of equal shares, built by hand."""
    replicas = len(sends)
    matrix = np.zeros((replicas, replicas))
    for i in range(replicas):
        to = [i, *np.flatnonzero(sends[i]).tolist()]
        for j in to:
            matrix[j, i] += 1 / len(to)
    return float(np.sort(np.abs(np.linalg.eigvals(matrix)))[-2])


def distances(sends: np.ndarray, rounds: int, weighted: bool = True) -> list[float]:
    """Distance of the estimates to the mean after each round, in numpy.

    Args:
      sends: the graph.
      rounds: number of rounds.
      weighted: whether estimates are divided by the weights of push-sum.
    """
    matrix = push_sum.out_shares(sends)
    x = np.random.default_rng(0).normal(size=(len(sends), _NUMBERS))
    mean, weight, found = x.mean(0), np.ones((len(sends), 1)), []
    for _ in range(rounds + 1):
        estimates = x / weight if weighted else x
        found.append(float(np.linalg.norm(estimates - mean)))
        x, weight = matrix @ x, matrix @ weight
    return [distance / found[0] for distance in found]


def rate(curve: Sequence[float]) -> float:
    """The factor of a round: the slope of the logarithm, from a third of the way on.

    Rounds at the precision of the numbers are left out.
    """
    shown = [x for x in curve if x > 1e-11]
    logs = np.log(shown[len(shown) // 3 :])
    return float(np.exp(np.polyfit(np.arange(len(logs)), logs, 1)[0]))


def on_devices(sends: np.ndarray, rounds: int = 60) -> tuple[float, float]:
    """(error of the mean, change of the total) of a compiled push-sum on 8 devices."""
    layout = meshpar.layouts.parse(f"replica={_DEVICES}")
    mesh = meshpar.mesh.make_mesh(layout, jax.devices()[:_DEVICES])
    spec, matrix = PartitionSpec("replica"), push_sum.out_shares(sends)

    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(_: int, both: tuple) -> tuple:
            return push_sum.mix(*both, matrix, "replica")

        start = x[0], x[0, 0] * 0 + 1
        x, weight = jax.lax.fori_loop(0, rounds, body, start)
        return x[None], (x / weight)[None]

    x = np.random.default_rng(0).normal(size=(_DEVICES, _NUMBERS)).astype(np.float32)
    program = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=(spec, spec))
    end, estimates = jax.jit(program)(jnp.asarray(x))
    exact = x.astype(float)
    error = np.abs(np.asarray(estimates) - exact.mean(0)).max()
    total = np.abs(np.asarray(end, float).sum(0) - exact.sum(0)).max()
    return float(error), float(total)


def device_claims(seed: int = 0) -> tuple[Claim, ...]:
    """Claims about the compiled program."""
    error, total = on_devices(graphs(_DEVICES, seed)[_RANDOM_DIRECTED])
    return (
        Claim(
            f"the compiled program on {_DEVICES} devices finds the mean of a directed "
            "graph",
            "the true average (Kempe et al.)",
            f"{error:.0e} off after 60 rounds",
            error < 1e-5,
        ),
        Claim(
            "and keeps the total",
            "mass is conserved (Kempe et al.)",
            f"{total:.0e} off",
            total < 1e-5,
        ),
    )


def rate_claims(curves: dict[str, dict[int, list[float]]]) -> tuple[Claim, ...]:
    """Claims about rates and about means without weights.

    Args:
      curves: {graph: {replicas: distances}} of push-sum.
    """
    pairs = {
        (name, n): (rate(curve), second_eigenvalue(graphs(n)[name]))
        for name, by_size in curves.items()
        for n, curve in by_size.items()
    }
    largest = max(n for _, n in pairs)
    shown = {name: pair for (name, n), pair in pairs.items() if n == largest}
    off = max(abs(found / wanted - 1) for found, wanted in pairs.values())
    sends = graphs(largest)[_RANDOM_DIRECTED]
    biased = distances(sends, 400, weighted=False)[-1]
    right = distances(sends, 400)[-1]
    return (
        Claim(
            "a round shrinks the distance by the second eigenvalue, on every graph",
            "1 minus the spectral gap a round",
            ", ".join(f"{name} {a:.4f} ({b:.4f})" for name, (a, b) in shown.items())
            + f", R={largest}; {off:.1%} off at most",
            off < 0.02,
        ),
        Claim(
            "without the weights replicas of a directed graph agree on another number",
            "column sums alone do not give the average",
            f"{biased:.2f} of the start off for good, and {right:.0e} with them",
            biased > 0.05 and right < 1e-10,
        ),
        Claim(
            "the exponential graph is faster than the random and the ring",
            "its gap is the largest at that degree (Assran et al.)",
            ", ".join(
                f"{name} {shown[name][0]:.3f}"
                for name in (_EXPONENTIAL, _RANDOM, _RING)
            ),
            shown[_EXPONENTIAL][0] < shown[_RANDOM][0] < shown[_RING][0],
        ),
    )


def mean_square(sends: np.ndarray, ticks: int, runs: int) -> tuple[list[float], float]:
    """(mean squared distance after each tick, largest change of a run's mean).

    The ticks are those of asynchronous gossip; every run draws pairs of its own.
    """
    total, drift = np.zeros(ticks + 1), 0.0
    for run in range(runs):
        x = np.random.default_rng([run, 1]).normal(size=len(sends))
        mean, pairs = x.mean(), push_sum.pairs(sends, seed=run)
        total[0] += np.square(x - mean).sum()
        for tick in range(ticks):
            x = next(pairs) @ x
            total[tick + 1] += np.square(x - mean).sum()
        drift = max(drift, float(abs(x.mean() - mean)))
    return (total / total[0]).tolist(), drift


def pair_rates(sends: np.ndarray) -> tuple[float, float]:
    """(the factor of a tick of the mean square, the paper's bound of it).

    The factor is the second eigenvalue of the mean of W (x) W over all pairs, and the
    bound that of the mean of W.
    """
    replicas, once, twice = len(sends), 0.0, 0.0
    for i in range(replicas):
        to = np.flatnonzero(sends[i])
        for j in to:
            gap = np.zeros(replicas)
            gap[i], gap[j] = 1, -1
            matrix = np.eye(replicas) - np.outer(gap, gap) / 2
            chance = 1 / (replicas * len(to))
            once, twice = (
                once + chance * matrix,
                twice + chance * np.kron(matrix, matrix),
            )
    # Differences from the mean stay among themselves.
    away = np.eye(replicas) - 1 / replicas
    both = np.kron(away, away)
    within = np.sort(np.abs(np.linalg.eigvals(both @ twice @ both)))
    return float(within[-1]), float(np.sort(np.linalg.eigvalsh(once))[-2])


def pair_claims(found: dict[str, tuple[list[float], float]]) -> tuple[Claim, ...]:
    """Claims about asynchronous gossip.

    Args:
      found: {graph: (mean squares, largest change of a mean)} of 8 replicas.
    """
    by_name = graphs(_DEVICES)
    rates = {
        name: (rate(x), *pair_rates(by_name[name])) for name, (x, _) in found.items()
    }
    drift = max(drift for _, drift in found.values())
    return (
        Claim(
            "asynchronous gossip keeps the mean in every run",
            "pairwise averages keep the sum (Boyd et al.)",
            f"{drift:.0e} off at most",
            drift < 1e-12,
        ),
        Claim(
            "a tick shrinks the mean square as predicted, and faster than the bound",
            "at most the second eigenvalue of the mean matrix (Boyd et al.)",
            "; ".join(
                f"{name} {a:.4f}, predicted {b:.4f}, bound {c:.4f}"
                for name, (a, b, c) in rates.items()
            ),
            all(abs(np.log(a) / np.log(b) - 1) < 0.1 for a, b, _ in rates.values())
            and all(a < c for a, _, c in rates.values()),
        ),
    )


def curves_of(sizes: Sequence[int]) -> dict[str, dict[int, list[float]]]:
    """{graph: {replicas: distances}} of push-sum."""
    curves: dict[str, dict[int, list[float]]] = {}
    for size in sizes:
        for name, sends in graphs(size).items():
            curves.setdefault(name, {})[size] = distances(sends, 2 * size**2)
    return curves


def squares_of(runs: int) -> dict[str, tuple[list[float], float]]:
    """{graph: (mean squares, largest change of a mean)} of 8 replicas."""
    by_name = graphs(_DEVICES)
    return {name: mean_square(by_name[name], 100, runs) for name in (_RING, _RANDOM)}


def _run(setting: Setting) -> Result:
    sizes, runs = ((8, 16), 300) if setting.quick else ((8, 16, 32, 64), 1000)
    setting.progress("push-sum", 0.0)
    curves = curves_of(sizes)
    setting.progress("pairs", 0.2)
    pairs, by_name = squares_of(runs), graphs(_DEVICES)
    setting.progress("the compiled program", 0.9)
    claims = *device_claims(), *rate_claims(curves), *pair_claims(pairs)

    def draw(figure: matplotlib.figure.Figure) -> None:
        left, right = figure.subplots(1, 2)
        for name, by_size in curves.items():
            curve = by_size[16]
            left.plot([max(x, 1e-8) for x in curve[:60]], label=name)
        left.set(yscale="log", xlabel="rounds", ylabel="distance to the mean, R=16")
        left.legend(fontsize=7)
        for name, (curve, _) in pairs.items():
            right.plot(curve, label=f"pairs, {name}")
            bound = pair_rates(by_name[name])[1]
            right.plot(bound ** np.arange(len(curve)), ":", label=f"bound, {name}")
        right.set(yscale="log", xlabel="ticks", ylabel="mean square, R=8")
        right.legend(fontsize=7)

    table = [
        (
            name,
            str(n),
            f"{rate(curve):.4f}",
            f"{second_eigenvalue(graphs(n)[name]):.4f}",
        )
        for name, by_size in curves.items()
        for n, curve in by_size.items()
    ]
    return Result(
        ("graph", "replicas", "factor of a round", "second eigenvalue"),
        tuple(table),
        claims,
        {
            "rounds": {
                name: {n: x[:60] for n, x in by.items()} for name, by in curves.items()
            },
            "pairs": pairs,
        },
        draw,
    )


PAPER = Paper(
    name="push_sum",
    title="Push-sum and asynchronous gossip",
    source="Kempe, Dobra, Gehrke, FOCS 2003; Assran et al., ICML 2019, "
    "arXiv:1811.10792; Boyd et al., IEEE Transactions on Information Theory 2006",
    shows="distance of the estimates to the mean over rounds of push-sum, by graph, "
    "and over ticks of asynchronous gossip",
    run=_run,
)
