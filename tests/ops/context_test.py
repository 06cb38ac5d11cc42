"""Attention over split sequences equals attention over whole ones, in every mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import meshpar
from meshpar import layouts
from meshpar.errors import LayoutError
from meshpar.layouts.context_modes import CONTEXT_MODES
from meshpar.ops import context
from meshpar.ops.attention_kernels import reference
from meshpar.ops.context import ring

B, L, N, H = 2, 32, 8, 4


def qkv(kv_heads=N):
    keys = jax.random.split(jax.random.key(0), 3)
    heads = N, kv_heads, kv_heads
    pairs = zip(keys, heads, strict=True)
    return [jax.random.normal(key, (B, L, n, H)) for key, n in pairs]


def mapped(fn, text):
    """A function of one device's tokens as one of whole sequences."""
    layout = layouts.parse(text)
    mesh = meshpar.make_mesh(layout, jax.devices()[: layout.num_devices])
    manual = {axis for axis, n in layout.sizes.items() if n > 1} - {"tensor"}
    spec = PartitionSpec("data" if layout.data > 1 else None, "context")

    def on_shard(*arrays):
        with layouts.use(layout, mesh, manual):
            return fn(*arrays)

    of_shards = jax.shard_map(
        on_shard, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=manual
    )
    return jax.jit(of_shards)


def with_gradients(fn, arrays):
    pull = jnp.cos(jnp.arange(arrays[0].size)).reshape(arrays[0].shape)

    def loss(*arrays):
        y = fn(*arrays)
        return jnp.sum(y * pull), y

    gradients, y = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays)
    return [y, *gradients]


@functools.cache
def expected(kv_heads):
    return with_gradients(reference, qkv(kv_heads))


def error(got, want):
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


@pytest.mark.parametrize("mode", CONTEXT_MODES)
@pytest.mark.parametrize(
    ("layout", "kv_heads"),
    [("context=2", 1), ("context=4", 2), ("context=8", 8)]
    + [("context=8", 2), ("data=2,context=2,tensor=2", 4), ("context=4,tensor=2", 2)],
)
def test_every_mode_equals_whole_sequences(mode, layout, kv_heads):
    run = mapped(context.attention, f"{layout},context_mode={mode}")
    results = with_gradients(run, qkv(kv_heads))
    for got, want in zip(results, expected(kv_heads), strict=True):
        assert error(got, want) < 1e-5


@pytest.mark.parametrize("mode", CONTEXT_MODES)
def test_the_jit_lowering_takes_the_same_modes(mode):
    layout = layouts.parse(f"data=2,context=2,tensor=2,context_mode={mode}")
    mesh = meshpar.make_mesh(layout)

    def run(*arrays):
        with layouts.use(layout, mesh):
            return context.attention(*arrays)

    arrays = qkv(4)
    with jax.set_mesh(mesh):
        results = jax.jit(lambda *a: with_gradients(run, a))(*arrays)
    for got, want in zip(results, expected(4), strict=True):
        assert error(got, want) < 1e-5


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
    whole = ring._backward

    def of_one_block(q, kv, y, lse, dy):
        own = ring._scores(ring._grouped(q, kv), kv[0], 0)
        alone = jax.nn.logsumexp(own, axis=-1).reshape(lse.shape)
        return whole(q, kv, y, alone, dy)

    monkeypatch.setattr(ring, "_backward", of_one_block)
    run = mapped(context.attention, "context=4,context_mode=ring")
    y, *gradients = with_gradients(run, qkv())
    want, *wanted = expected(N)
    assert error(y, want) < 1e-5
    assert all(error(g, w) > 1e-2 for g, w in zip(gradients, wanted, strict=True))


def test_blocks_are_not_merged_by_a_stopped_log_sum_exp(monkeypatch):
    """Some kernels return one without a gradient; their outputs are right."""

    def merged(q, k, v):
        return ring._forward(q, jnp.stack([k, v]))[0]

    results = with_gradients(mapped(merged, "context=4"), qkv())
    assert all(error(g, w) < 1e-5 for g, w in zip(results, expected(N), strict=True))
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
    with pytest.raises(LayoutError, match="heads=4 does not divide over context=8"):
        run(q, k, v)


def test_modes_are_words_of_layouts():
    with pytest.raises(LayoutError, match="context_mode='rings'.*ring"):
        layouts.parse("context=2,context_mode=rings")
    with pytest.raises(LayoutError, match="context=1: add context=N"):
        layouts.parse("data=2,context_mode=ring")
