"""Communication patterns: on 8 devices, message by message, and their costs."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
from jax.sharding import PartitionSpec

import meshpar
from experiments.gallery import messages
from experiments.gallery.paper import Claim, Paper, Result, Setting
from meshpar import collectives
from meshpar.contracts.hlo import parse_hlo
from meshpar.contracts.hlo_text import parse_computations
from meshpar.methods import pattern_costs as costs

_AXIS, _N, _ROOT, _TARGET = "data", 8, 3, 6
_LATENCY, _BANDWIDTH = 1e-6, 50e9
"""Of a link: seconds of a message, and bytes per second (those of the table)."""

_BYTES, _MOST = 2**20, 64
"""Payload of the table, and its largest number of devices."""

_NUMBERS = np.random.default_rng(0).integers(-99, 99, (_N, 16, 3)).astype(np.float32)


def _root_alone(x: np.ndarray, root: int) -> list[np.ndarray]:
    return [x if i == root else np.zeros_like(x) for i in range(_N)]


def definitions() -> dict[str, tuple[Callable, list[np.ndarray]]]:
    """{pattern: (function of (x, axis), what numpy says every device gets)}."""
    x = _NUMBERS
    parts = lambda a: np.split(a, _N)  # noqa: E731
    total, joined = x.sum(0), np.concatenate(list(x))
    swapped = [np.concatenate([parts(a)[i] for a in x], axis=1) for i in range(_N)]
    root = {"root": _ROOT}
    return {
        "send": (
            functools.partial(collectives.send, source=_ROOT, target=_TARGET),
            _root_alone(x[_ROOT], _TARGET),
        ),
        "broadcast": (
            functools.partial(collectives.broadcast, **root),
            [x[_ROOT]] * _N,
        ),
        "reduce": (
            functools.partial(collectives.reduce, **root),
            _root_alone(total, _ROOT),
        ),
        "all_reduce": (collectives.all_reduce, [total] * _N),
        "scatter": (functools.partial(collectives.scatter, **root), parts(x[_ROOT])),
        "gather": (
            functools.partial(collectives.gather, **root),
            _root_alone(joined, _ROOT),
        ),
        "all_gather": (collectives.all_gather, [joined] * _N),
        "reduce_scatter": (collectives.reduce_scatter, parts(total)),
        "all_to_all": (
            functools.partial(collectives.all_to_all, split=0, join=1),
            swapped,
        ),
        "barrier": (collectives.barrier, list(x)),
    }


def _compiled(fn: Callable) -> jax.stages.Compiled:
    """A function of (x, axis) on 8 devices."""
    layout = meshpar.layouts.parse(f"{_AXIS}={_N}")
    mesh = meshpar.mesh.make_mesh(layout, jax.devices()[:_N])
    spec = PartitionSpec(_AXIS)
    body = lambda x: fn(x[0], _AXIS)[None]  # noqa: E731
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(mapped).lower(jnp.asarray(_NUMBERS)).compile()


def wrong_patterns() -> list[str]:
    """Patterns whose compiled program gives other numbers than numpy, on 8 devices."""
    return [
        name
        for name, (fn, wanted) in definitions().items()
        if not np.array_equal(_compiled(fn)(jnp.asarray(_NUMBERS)), np.stack(wanted))
    ]


_IN_STEPS = {
    ("all_gather", costs.RING): (collectives.ring_all_gather, _N),
    ("reduce_scatter", costs.RING): (collectives.ring_reduce_scatter, 1),
    ("all_reduce", costs.RING): (collectives.ring_all_reduce, 1),
    ("broadcast", costs.TREE): (collectives.tree_broadcast, 1),
    ("all_reduce", costs.TREE): (collectives.tree_all_reduce, 1),
}
"""{(pattern, topology): (the library's steps, payload over a device's x)}."""


def steps_of(fn: Callable, size: int) -> tuple[int, float]:
    """(permutes of a compiled program, payloads that they carry)."""
    found = parse_hlo(_compiled(fn).as_text(), {_AXIS: _N})
    payload = size * _NUMBERS[0].nbytes
    carried = sum(c.payload_bytes * c.executions for c in found if c.kind == "permute")
    count = sum(c.executions for c in found if c.kind == "permute")
    return count, carried / payload


def waits(by_wait: bool) -> bool:
    """Whether a second message of a compiled program follows the arrival of the first.

    The messages have nothing else to do with each other.
    """

    def two(x: jax.Array, axis: str) -> jax.Array:
        first = collectives.send(x, axis, 0, 1)
        later = collectives.wait(first, x) if by_wait else x
        return first + 2 * collectives.send(later, axis, 2, 3)

    computations, entry = parse_computations(_compiled(two).as_text())
    scope = computations[entry]

    def before(name: str) -> set[str]:
        """Instructions whose results an instruction needs."""
        operands = [x for x in scope[name].operands if x in scope]
        return {*operands, *(y for x in operands for y in before(x))}

    sent = [n for n, x in scope.items() if x.opcode.startswith("collective-permute")]
    return any(one in before(other) for one in sent for other in sent)


def program_claims() -> list[Claim]:
    """Whether the patterns' programs do what their names say."""
    wrong = wrong_patterns()
    steps = {key: steps_of(*value) for key, value in _IN_STEPS.items()}
    closed = {key: costs.cost(*key, _N) for key in _IN_STEPS}
    with_wait, without = waits(True), waits(False)
    return [
        Claim(
            f"{len(definitions())} patterns on {_N} devices give numpy's numbers",
            "by definition",
            f"wrong: {', '.join(wrong)}" if wrong else "all equal",
            not wrong,
        ),
        Claim(
            "rings and trees that are compiled have the messages of the closed forms",
            ", ".join(f"{c.messages} x {c.payloads:.3g}" for c in closed.values()),
            ", ".join(f"{n} x {carried:.3g}" for n, carried in steps.values()),
            all(
                n == closed[key].messages and math.isclose(x, closed[key].payloads)
                for key, (n, x) in steps.items()
            ),
        ),
        Claim(
            "a message that waits for another follows it in the compiled program",
            "",
            f"with wait: {with_wait}, without: {without}",
            with_wait and not without,
        ),
    ]


def simulation_claims(sizes: tuple[int, ...]) -> list[Claim]:
    """Whether the closed forms are the time of messages that are sent one by one."""
    wrong, count = [], 0
    for n in sizes:
        for topology in costs.TOPOLOGIES:
            if n & (n - 1) and topology in (costs.TREE, costs.FULL):
                continue
            for pattern in costs.PATTERNS:
                found, closed = (
                    messages.simulate(pattern, topology, n),
                    costs.cost(pattern, topology, n),
                )
                count += 1
                if found[0] != closed.messages or not math.isclose(
                    found[1], closed.payloads, abs_tol=1e-12
                ):
                    wrong.append(f"{pattern} on a {topology} of {n}")
    first = f": {wrong[0]}" if wrong else ""
    return [
        Claim(
            "the closed forms are the time of messages, sent one after another",
            "",
            f"{count - len(wrong)} of {count} equal{first}",
            not wrong,
        )
    ]


def all_reduce_claims() -> list[Claim]:
    """Which topology sums fastest, by trying sizes and by the closed form."""
    ring, tree, star = (
        messages.simulate("all_reduce", name, _MOST)
        for name in (costs.RING, costs.TREE, costs.STAR)
    )
    seconds = lambda of, size: of[0] * _LATENCY + of[1] * size / _BANDWIDTH  # noqa: E731
    sizes = np.geomspace(1e3, 1e9, 6001)
    tried = float(next(x for x in sizes if seconds(ring, x) <= seconds(tree, x)))
    closed = costs.crossing_bytes(_MOST, _LATENCY, _BANDWIDTH)
    return [
        Claim(
            f"bytes from which a ring of {_MOST} sums faster than a tree, by trying",
            f"{closed:,.0f} by the closed form",
            f"{tried:,.0f}",
            abs(tried / closed - 1) < 0.01,
        ),
        Claim(
            f"payloads that pass one after another, all_reduce on {_MOST} devices",
            "2 (P-1)/P on a ring, 2 (P-1) through a hub",
            f"{ring[1]:.3f} and {star[1]:.0f}",
            math.isclose(ring[1], star[1] / _MOST) and star[1] == 2 * (_MOST - 1),
        ),
    ]


def _table(sizes: tuple[int, ...]) -> list[tuple[str, ...]]:
    """Microseconds of every pattern and number of devices, by topology."""
    rows = []
    for pattern in costs.PATTERNS:
        for n in sizes:
            found = [
                costs.cost(pattern, name, n).seconds(_BYTES, _LATENCY, _BANDWIDTH)
                for name in costs.TOPOLOGIES
            ]
            best = costs.fastest(pattern, n, _BYTES, _LATENCY, _BANDWIDTH)
            rows.append((pattern, str(n), *(f"{1e6 * x:.1f}" for x in found), best))
    return rows


def _draw(figure: matplotlib.figure.Figure) -> None:
    left, right = figure.subplots(1, 2)
    sizes, devices = np.geomspace(1e2, 1e9, 60), 2 ** np.arange(1, 11)
    for name in costs.TOPOLOGIES:
        at = functools.partial(costs.cost, "all_reduce", name)
        link = _LATENCY, _BANDWIDTH
        left.plot(sizes, [at(_MOST).seconds(x, *link) for x in sizes], label=name)
        many = [at(int(n)).seconds(_BYTES, *link) for n in devices]
        right.plot(devices, many, "o-", markersize=3, label=name)
    crossing = costs.crossing_bytes(_MOST, _LATENCY, _BANDWIDTH)
    left.axvline(crossing, color="#888888", linestyle=":")
    left.set(xlabel=f"bytes, {_MOST} devices", ylabel="seconds of an all_reduce")
    right.set(xlabel="devices, 1 MiB")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log")
    left.legend(fontsize=8)


def _run(setting: Setting) -> Result:
    setting.progress("patterns on 8 devices", 0.0)
    claims = program_claims()
    setting.progress("messages", 0.7)
    sizes = (2, 4, 8, 16) if setting.quick else (2, 3, 4, 5, 7, 8, 16, 32, 64)
    claims += simulation_claims(sizes) + all_reduce_claims()
    shown = (8,) if setting.quick else (4, 16, 64)
    columns = ("pattern", "devices", *(f"{name}, us" for name in costs.TOPOLOGIES))
    return Result(
        (*columns, "fastest"),
        tuple(_table(shown)),
        tuple(claims),
        {
            "latency": _LATENCY,
            "bandwidth": _BANDWIDTH,
            "bytes": _BYTES,
            "messages_and_payloads": {
                pattern: {
                    name: [
                        [n, one.messages, one.payloads]
                        for n in shown
                        for one in [costs.cost(pattern, name, n)]
                    ]
                    for name in costs.TOPOLOGIES
                }
                for pattern in costs.PATTERNS
            },
        },
        _draw,
    )


PAPER = Paper(
    name="communication_patterns",
    title="Communication patterns and their costs by topology",
    source="Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005; Chan et al., "
    "Concurrency and Computation 19(13), 2007; no figure of theirs",
    shows="seconds of an all_reduce over its bytes and over devices, on a ring, a "
    "tree, a star and a full graph",
    run=_run,
)
