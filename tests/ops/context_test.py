"""Attention over split sequences equals attention over whole ones, in every mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.marks import slow

import meshpar
from meshpar import layouts
from meshpar.collectives.transport import Rings, Transports
from meshpar.errors import LayoutError
from meshpar.jaxprs.walk import equations
from meshpar.layouts.context_modes import CONTEXT_MODES
from meshpar.layouts.token_order import device_order
from meshpar.ops import context
from meshpar.ops.attention_kernels import reference
from meshpar.ops.context import blocks, gathered, ring, visits

B, L, N, H = 2, 32, 8, 4


def qkv(kv_heads=N):
    draws = np.random.default_rng(0)
    heads = N, kv_heads, kv_heads
    return [jnp.asarray(draws.normal(size=(B, L, n, H)), jnp.float32) for n in heads]


def mapped(fn, text):
    """A function of one device's tokens as one of whole sequences."""
    layout = layouts.parse(text)
    mesh = meshpar.mesh.make_mesh(layout, jax.devices()[: layout.num_devices])
    manual = {axis for axis, n in layout.sizes.items() if n > 1} - {"tensor"}
    spec = PartitionSpec("data" if layout.data > 1 else None, "context")

    def on_shard(*arrays):
        with layouts.use(layout, mesh, manual):
            return fn(*arrays)

    of_shards = jax.shard_map(
        on_shard, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=manual
    )
    places = device_order(layout.token_order, L, layout.context)

    def reordered(*arrays):
        return of_shards(*(x[:, places] for x in arrays))[:, np.argsort(places)]

    return jax.jit(reordered)


def with_gradients(fn, arrays):
    pull = np.float32(np.cos(np.arange(arrays[0].size))).reshape(arrays[0].shape)

    def loss(*arrays):
        y = fn(*arrays)
        return jnp.sum(y * pull), y

    gradient = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
    gradients, y = jax.jit(gradient)(*arrays)
    return [y, *gradients]


@functools.cache
def expected(kv_heads):
    return with_gradients(reference, qkv(kv_heads))


def error(got, want):
    got, want = np.asarray(got), np.asarray(want)  # They are on different meshes.
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def assert_equal(results, wanted):
    for got, want in zip(results, wanted, strict=True):
        assert error(got, want) < 1e-5


BESIDE = "data=2,context=2,tensor=2"


@pytest.mark.parametrize(
    ("mode", "layout", "kv_heads"),
    [
        *((mode, "context=8", 2) for mode in CONTEXT_MODES),
        *(slow(mode, "context=2", 1) for mode in CONTEXT_MODES),
        slow("allgather", BESIDE, 4),
        slow("ulysses", BESIDE, 4),
        slow("ring", BESIDE, 4),
    ],
)
def test_every_mode_equals_whole_sequences(mode, layout, kv_heads):
    run = mapped(context.attention, f"{layout},context_mode={mode}")
    assert_equal(with_gradients(run, qkv(kv_heads)), expected(kv_heads))


@pytest.mark.parametrize(("head_dim", "rank"), [slow(H, 3), (128, 4)])
def test_heads_that_tpus_would_pad_are_gathered_side_by_side(head_dim, rank):
    arrays = [jnp.tile(x, head_dim // H) for x in qkv(2)]
    run = mapped(context.attention, "context=2")
    both = jax.make_jaxpr(lambda *arrays: with_gradients(run, arrays))(*arrays)
    moved = {
        (eqn.primitive.name, eqn.invars[0].aval.ndim)
        for eqn in equations(both.jaxpr)
        if eqn.primitive.name in ("all_gather", "reduce_scatter")
    }
    assert moved == {("all_gather", rank), ("reduce_scatter", rank)}
    assert_equal(with_gradients(run, arrays), with_gradients(reference, arrays))


@pytest.mark.parametrize(
    ("layout", "kv_heads"),
    [
        slow("context=4,context_order=contiguous", 8),
        slow("context=4,context_order=striped", 2),
        slow("context=4,context_mode=ring,context_order=contiguous", 2),
        ("context=4,context_mode=ring,context_order=striped", 8),
        slow("context=8,context_mode=ring,context_heads=2", 8),
        slow("context=8,context_mode=ring,context_heads=4,context_order=striped", 1),
        slow("context=4,tensor=2,context_mode=ring,context_heads=2", 2),
    ],
)
def test_orders_of_tokens_change_nothing(layout, kv_heads):
    run = mapped(context.attention, layout)
    assert_equal(with_gradients(run, qkv(kv_heads)), expected(kv_heads))


@pytest.mark.parametrize("order", ["zigzag", slow("contiguous"), slow("striped")])
def test_keys_around_rings_come_to_their_places(order, monkeypatch):
    rings = Rings({"context": (2, 2)})
    found = Transports(weights=rings, gradients=rings)
    monkeypatch.setattr(gathered, "transports_for", lambda mesh, axes: found)
    run = mapped(context.attention, f"context=4,context_order={order}")
    assert_equal(with_gradients(run, qkv()), expected(N))


def attention_by_hand(q, k, v, segments, window):
    """Softmax over the keys that each query sees, written out."""
    places = np.arange(L)
    distance = places[:, None] - places[None]
    seen = (distance >= 0) & (distance < (window or L))
    seen = seen[None] & (segments[:, :, None] == segments[:, None])
    k, v = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("BLNH,BMNH->BNLM", q, k) * H**-0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("BNLM,BMNH->BLNH", weights, v)


SEGMENTS = np.repeat([[0, 1, 2, 2], [3, 3, 4, 1]], [5, 9, 11, 7], axis=1)
"""Documents that end inside of parts, [B, L]."""


@pytest.mark.parametrize("window", [slow(0), 6])
@pytest.mark.parametrize(
    "options",
    [
        slow("context=1"),
        slow("context=4"),
        slow("context=4,context_order=striped"),
        "context=4,context_mode=ulysses",
        slow("context=4,context_mode=ring"),
        slow("context=4,context_mode=ring,context_heads=2"),
        "data=2,context=2,tensor=2,context_mode=ring,context_order=contiguous",
    ],
)
def test_documents_and_windows_are_kept(options, window):
    def run(q, k, v, segments):
        return context.attention(q, k, v, window=window, segments_BL=segments)

    arrays, segments = qkv(2), jnp.asarray(SEGMENTS)
    of_shards = mapped(run, options)
    results = with_gradients(lambda *a: of_shards(*a, segments), arrays)
    by_hand = functools.partial(attention_by_hand, segments=SEGMENTS, window=window)
    assert_equal(results, with_gradients(by_hand, arrays))


@pytest.mark.parametrize("mode", ["allgather", slow("ring")])
def test_queries_in_blocks_change_nothing(mode, monkeypatch):
    """Long parts are computed some queries at a time."""
    for file in (gathered, visits):
        monkeypatch.setattr(file, "_BLOCK", 3)
    run = mapped(context.attention, f"context=2,context_mode={mode}")
    assert_equal(with_gradients(run, qkv()), expected(N))


@pytest.mark.parametrize("mode", CONTEXT_MODES)
def test_the_jit_lowering_takes_the_same_modes(mode):
    layout = layouts.parse(f"data=2,context=2,tensor=2,context_mode={mode}")
    mesh = meshpar.mesh.make_mesh(layout)

    def run(*arrays):
        with layouts.use(layout, mesh):
            return context.attention(*arrays)

    arrays = qkv(4)
    with jax.set_mesh(mesh):
        results = jax.jit(lambda *a: with_gradients(run, a))(*arrays)
    assert_equal(results, expected(4))


@pytest.mark.slow
@pytest.mark.parametrize("mode", CONTEXT_MODES)
def test_no_position_sees_a_later_one(mode):
    """Gradients across the borders of shards, too: a part has four tokens here."""
    run = mapped(context.attention, f"context=8,context_mode={mode}")
    for position in (3, 4, 17):
        grads = jax.grad(
            lambda arrays, at=position: jnp.sum(jnp.sin(run(*arrays)[:, at]))
        )(qkv())
        for gradient in grads:
            np.testing.assert_array_equal(gradient[:, position + 1 :], 0)
        for gradient in grads[1:]:
            assert np.all(np.any(gradient[:, : position + 1] != 0, axis=(0, 2, 3)))


def test_a_ring_needs_the_log_sum_exp_of_all_blocks(monkeypatch):
    """With that of each block alone, the backward pass is wrong: the test can fail."""
    of_all = ring.block_gradients

    def of_one_block(q, kv, seen, outer):
        alone = blocks.with_block(blocks.no_blocks(q), q, kv, seen).lse
        return of_all(q, kv, seen, outer._replace(lse=alone))

    monkeypatch.setattr(ring, "block_gradients", of_one_block)
    run = mapped(context.attention, "context=4,context_mode=ring")
    y, *gradients = with_gradients(run, qkv())
    want, *wanted = expected(N)
    assert error(y, want) < 1e-5
    assert all(error(g, w) > 1e-2 for g, w in zip(gradients, wanted, strict=True))


@pytest.mark.slow
def test_blocks_are_not_merged_by_a_stopped_log_sum_exp(monkeypatch):
    """Some kernels return one without a gradient; their outputs are right."""
    whole = ring._Ring(visits.Places(4, 1, "zigzag"), 0)

    def merged(q, k, v):
        return whole.forward(q, jnp.stack([k, v]))[0]

    run = mapped(merged, "context=4")
    assert_equal(with_gradients(run, qkv()), expected(N))
    plain = jax.nn.logsumexp

    def stopped(scores, axis):
        return jax.lax.stop_gradient(plain(scores, axis=axis))

    monkeypatch.setattr(jax.nn, "logsumexp", stopped)
    y, dq, dk, dv = with_gradients(mapped(merged, "context=4"), qkv())
    want, *wanted = expected(N)
    assert error(y, want) < 1e-5
    assert error(dq, wanted[0]) > 1e-2 and error(dk, wanted[1]) > 1e-2


def test_positions_count_whole_sequences():
    def numbers(x_BL):
        places = context.positions(x_BL.shape[1])
        return jnp.broadcast_to(places[None], x_BL.shape)

    run = mapped(numbers, "data=2,context=4")
    np.testing.assert_array_equal(run(jnp.zeros((B, L)))[1], np.arange(L))
    np.testing.assert_array_equal(context.positions(3), [0, 1, 2])


def test_heads_that_do_not_divide_are_refused():
    run = mapped(context.attention, "context=8,context_mode=ulysses")
    q, k, v = (x[:, :, :4] for x in qkv())
    with pytest.raises(LayoutError, match="heads=4 does not divide over the 8 devices"):
        run(q, k, v)


def test_modes_are_words_of_layouts():
    with pytest.raises(LayoutError, match="context_mode='rings'.*ring"):
        layouts.parse("context=2,context_mode=rings")
    with pytest.raises(LayoutError, match="context=1: .*add context=N"):
        layouts.parse("data=2,context_mode=ring")
    with pytest.raises(LayoutError, match="context_order='zag'.*zigzag"):
        layouts.parse("context=2,context_order=zag")
    with pytest.raises(
        LayoutError, match="striped with context=1: .*that context splits"
    ):
        layouts.parse("context_order=striped")
    with pytest.raises(LayoutError, match="equal work in any order"):
        layouts.parse("context=2,context_mode=ulysses,context_order=zigzag")
    with pytest.raises(
        LayoutError, match="context_heads=2 with .*allgather: .*of rings"
    ):
        layouts.parse("context=4,context_heads=2")
    with pytest.raises(LayoutError, match="with context=4: .*no ring of devices"):
        layouts.parse("context=4,context_mode=ring,context_heads=4")
