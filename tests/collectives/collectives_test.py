"""Every pattern equals its definition, and moves the bytes of its formula."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from meshpar import collectives
from meshpar.contracts import cost, parse_hlo
from meshpar.methods import pattern_costs

N, ROOT = 8, 3
X = np.random.default_rng(0).integers(-9, 9, (N, 16, 3)).astype(np.float32)
SUM = X.sum(0)
ZEROS = np.zeros_like(SUM)


def everywhere(value):
    return np.stack([value] * N)


def only_root(value):
    return np.stack([value if i == ROOT else np.zeros_like(value) for i in range(N)])


def parts(value, dim=0):
    return np.stack(np.split(value, N, axis=dim))


JOINED = np.concatenate(list(X))
SWAPPED = np.stack(
    [np.concatenate([np.split(x, N)[i] for x in X], axis=1) for i in range(N)]
)
WHOLE = X[0].nbytes


def folded(parts):
    """First halves of all parts, then all second halves in the reverse order."""
    early, late = zip(*(np.split(part, 2) for part in parts), strict=True)
    return np.concatenate([*early, *late[::-1]])


def parts_of_folded(value):
    halves = np.split(value, 2 * N)
    return np.stack(
        [np.concatenate([halves[i], halves[2 * N - 1 - i]]) for i in range(N)]
    )


PATTERNS = {
    "all_reduce": (collectives.all_reduce, everywhere(SUM), {"all_reduce": [WHOLE]}),
    "all_gather": (
        collectives.all_gather,
        everywhere(JOINED),
        {"all_gather": [N * WHOLE]},
    ),
    "pull": (collectives.pull, everywhere(JOINED), {"all_gather": [N * WHOLE]}),
    "reduce_scatter": (
        collectives.reduce_scatter,
        parts(SUM),
        {"reduce_scatter": [WHOLE]},
    ),
    "push": (collectives.push, parts(SUM), {"reduce_scatter": [WHOLE]}),
    "all_to_all": (
        functools.partial(collectives.all_to_all, split=0, join=1),
        SWAPPED,
        {"all_to_all": [WHOLE]},
    ),
    "broadcast": (
        functools.partial(collectives.broadcast, root=ROOT),
        everywhere(X[ROOT]),
        {"all_reduce": [WHOLE]},
    ),
    "reduce": (
        functools.partial(collectives.reduce, root=ROOT),
        only_root(SUM),
        {"all_reduce": [WHOLE]},
    ),
    "scatter": (
        functools.partial(collectives.scatter, root=ROOT),
        parts(X[ROOT]),
        {"reduce_scatter": [WHOLE]},
    ),
    "gather": (
        functools.partial(collectives.gather, root=ROOT),
        only_root(JOINED),
        {"all_gather": [N * WHOLE]},
    ),
    "send": (
        functools.partial(collectives.send, source=ROOT, target=5),
        np.stack([X[ROOT] if i == 5 else ZEROS for i in range(N)]),
        {"permute": [WHOLE]},
    ),
    "wait": (
        lambda x, axis: collectives.wait(collectives.all_reduce(x, axis), x),
        X,
        {"all_reduce": [WHOLE]},
    ),
    "barrier": (collectives.barrier, X, {"all_reduce": [4]}),
    "ring_all_gather": (
        collectives.ring_all_gather,
        everywhere(JOINED),
        {"permute": [WHOLE] * (N - 1)},
    ),
    "ring_reduce_scatter": (
        collectives.ring_reduce_scatter,
        parts(SUM),
        {"permute": [WHOLE // N] * (N - 1)},
    ),
    "torus_reduce_scatter": (
        functools.partial(collectives.torus_reduce_scatter, shape=(2, 2, 2)),
        parts(SUM),
        {"permute": [WHOLE // 2, WHOLE // 4, WHOLE // 8]},
    ),
    "torus_reduce_scatter in loops": (
        functools.partial(collectives.torus_reduce_scatter, shape=(2, 4), loop=True),
        parts(SUM),
        {"permute": [WHOLE // 2] + [WHOLE // 8] * 3},
    ),
    "torus_all_gather": (
        functools.partial(collectives.torus_all_gather, shape=(2, 4)),
        everywhere(JOINED),
        {"permute": [WHOLE] * 3 + [4 * WHOLE]},
    ),
    "torus_all_gather, folded": (
        functools.partial(collectives.torus_all_gather, shape=(2, 4), folded=True),
        everywhere(folded(X)),
        {"permute": [WHOLE] * 3 + [4 * WHOLE]},
    ),
    "torus_reduce_scatter, folded": (
        functools.partial(collectives.torus_reduce_scatter, shape=(4, 2), folded=True),
        parts_of_folded(SUM),
        {"permute": [WHOLE // 4] * 3 + [WHOLE // 8]},
    ),
    "ring_all_reduce": (
        collectives.ring_all_reduce,
        everywhere(SUM),
        {"permute": [WHOLE // N] * (2 * (N - 1))},
    ),
    "tree_broadcast": (
        functools.partial(collectives.tree_broadcast, root=ROOT),
        everywhere(X[ROOT]),
        {"permute": [WHOLE] * 3},
    ),
    "tree_all_reduce": (
        collectives.tree_all_reduce,
        everywhere(SUM),
        {"permute": [WHOLE] * 6},
    ),
}


@functools.cache
def program(name):
    mesh = jax.make_mesh((N,), ("x",), axis_types=(AxisType.Auto,))

    def body(x_1AB):
        return PATTERNS[name][0](x_1AB[0], "x")[None]

    spec = PartitionSpec("x")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(mapped).lower(jnp.asarray(X)).compile()


@pytest.mark.parametrize("name", PATTERNS)
def test_equals_its_definition(name):
    np.testing.assert_array_equal(program(name)(jnp.asarray(X)), PATTERNS[name][1])


@pytest.mark.parametrize("name", PATTERNS)
def test_moves_what_it_declares(name):
    payloads: dict[str, list[int]] = {}
    for moved in parse_hlo(program(name).as_text(), {"x": N}):
        assert moved.axes == ("x",) and moved.group_size == N
        assert moved.executions == 1 or name.endswith("in loops")
        assert moved.source.split(":")[0].endswith(("patterns.py", "rings.py"))
        runs = [moved.payload_bytes] * moved.executions
        payloads.setdefault(moved.kind, []).extend(runs)
    assert payloads == PATTERNS[name][2]


@pytest.mark.parametrize(
    "ring, native",
    [("ring_all_reduce", "all_reduce"), ("ring_all_gather", "all_gather")],
)
def test_rings_send_as_many_bytes_as_the_native_collective(ring, native):
    def sent(name):
        rows = parse_hlo(program(name).as_text(), {"x": N})
        return sum(collective.wire_bytes for collective in rows)

    assert sent(ring) == sent(native)
    ((kind, (payload,)),) = PATTERNS[native][2].items()
    assert sent(native) == cost.wire_bytes(kind, payload, N)


def test_steps_are_the_permutes_of_rings_and_trees():
    for name, kind, form in (
        ("ring_all_gather", "all_gather", "ring"),
        ("ring_reduce_scatter", "reduce_scatter", "ring"),
        ("ring_all_reduce", "all_reduce", "ring"),
        ("tree_broadcast", "broadcast", "tree"),
        ("tree_all_reduce", "all_reduce", "tree"),
    ):
        assert len(PATTERNS[name][2]["permute"]) == cost.steps(kind, N, form)
    assert cost.steps("all_reduce", 1) == 0
    with pytest.raises(ValueError, match="no 'tree' form"):
        cost.steps("all_to_all", N, "tree")


def test_a_collective_takes_the_time_of_its_messages_and_of_its_bytes():
    link = cost.Link(bandwidth=100.0, latency=2.0)
    # Over four devices 6 messages wait for each other, and 600 of 400 bytes are sent.
    assert cost.seconds("all_reduce", 400, 4, link) == 6 * 2 + 6
    assert cost.seconds("all_reduce", 400, 4, link, count=3) == 3 * 6 * 2 + 6
    both_ways = link._replace(ways=2)
    assert cost.seconds("all_reduce", 400, 4, both_ways) == 4 * 2 + 6
    assert cost.seconds("all_gather", 400, 5, both_ways) == 2 * 2 + 3.2
    assert cost.seconds("permute", 400, 8, both_ways) == 2 + 4
    assert cost.seconds("all_reduce", 400, 1, link) == 0
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        for n in (2, 3, 8):
            messages = pattern_costs.cost(kind, pattern_costs.RING, n).messages
            assert cost.seconds(kind, 0, n, link) == 2 * messages


@pytest.mark.parametrize("n", [3, 5])
def test_rings_and_trees_of_any_size(n):
    mesh = jax.make_mesh(
        (n,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n]
    )
    x = jnp.arange(n * n * 2.0).reshape(n, n, 2)

    def body(x_1AB):
        own = x_1AB[0]
        return (
            collectives.tree_all_reduce(own, "x")[None],
            collectives.ring_all_reduce(own, "x")[None],
            collectives.tree_broadcast(own, "x", 2)[None],
        )

    spec = PartitionSpec("x")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    tree, ring, sent = jax.jit(mapped)(x)
    for i in range(n):
        np.testing.assert_array_equal(tree[i], x.sum(0))
        np.testing.assert_array_equal(ring[i], x.sum(0))
        np.testing.assert_array_equal(sent[i], x[2])


@pytest.mark.parametrize(
    "call, words",
    [
        (
            lambda x: collectives.reduce_scatter(x, "x", 1),
            r"\[16, 3\] along dim 1: 3 does not",
        ),
        (
            lambda x: collectives.all_to_all(x, "x", 1, 0),
            "3 does not divide over axis 'x'",
        ),
        (lambda x: collectives.ring_reduce_scatter(x, "x", 1), "3 does not divide"),
        (
            lambda x: collectives.torus_reduce_scatter(x, "x", (3, 2)),
            r"shape \(3, 2\) does not have the 8 devices of axis 'x'",
        ),
        (
            lambda x: collectives.torus_all_gather(x, "x", (8, 2)),
            r"shape \(8, 2\) does not have the 8 devices of axis 'x'",
        ),
        (lambda x: collectives.broadcast(x, "x", 8), "root=8: axis 'x' has 8 devices"),
        (lambda x: collectives.send(x, "x", 0, -1), "target=-1: axis 'x' has 8"),
    ],
)
def test_errors(call, words):
    mesh = jax.make_mesh((N,), ("x",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("x")
    mapped = jax.shard_map(
        lambda x: call(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec
    )
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(mapped, jnp.asarray(X))
