"""Every form of attention equals plain jnp, in values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AxisType
from support.marks import slow

from meshpar import layouts
from meshpar.jaxprs.walk import equations
from meshpar.layouts.remat import CUDNN, wrap_remat
from meshpar.layouts.token_order import CONTIGUOUS, STRIPED, ZIGZAG, device_order
from meshpar.mesh import platform
from meshpar.ops import attention_kernels, context, kernels
from meshpar.ops.attention_by_heads import attention_by_heads


def arrays(heads=4, kv_heads=2, length=256, dim=128):
    draws = np.random.default_rng(0)
    shapes = [(2, length, n, dim) for n in (heads, kv_heads, kv_heads)]
    return [jnp.asarray(draws.normal(size=shape), jnp.float32) for shape in shapes]


def gradients(fn, *arrays):
    weights = np.float32(np.cos(np.arange(arrays[0].size))).reshape(arrays[0].shape)
    loss = jax.grad(lambda *a: (fn(*a) * weights).sum(), argnums=(0, 1, 2))
    return jax.jit(loss)(*arrays)


def test_shapes_that_cudnn_refuses_take_plain_jnp(monkeypatch):
    def refuse(*_, **__):
        raise NotImplementedError("The head dim must be <= 128")

    monkeypatch.setattr(attention_kernels, "cudnn", refuse)
    monkeypatch.setattr(attention_kernels.compat, "has_cudnn", lambda: True)
    monkeypatch.setattr(attention_kernels, "traced_platform", lambda: platform.GPU)
    qkv = [x.astype(jnp.bfloat16) for x in arrays(dim=160, length=8)]
    y, expected = attention_kernels.by_platform(*qkv), attention_kernels.reference(*qkv)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("head_dim", [slow(128), 64])
def test_splash_attention_equals_plain_jnp(head_dim):
    q, k, v = arrays(dim=head_dim)

    def interpreted(q, k, v):
        kernel = functools.partial(attention_kernels.splash_by_heads, interpret=True)
        return attention_kernels.splash(kernel, q, k, v)

    y, expected = interpreted(q, k, v), attention_kernels.reference(q, k, v)
    np.testing.assert_allclose(y, expected, rtol=2e-4, atol=2e-5)
    both = (gradients(fn, q, k, v) for fn in (interpreted, attention_kernels.reference))
    for gradient, expected in zip(*both, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    "part, order, window, most_fused",
    [
        slow(0, CONTIGUOUS, 0, 8),
        slow(1, ZIGZAG, 0, 1),
        (1, STRIPED, 100, 8),
        slow(1, ZIGZAG, 100, 1),
    ],
)
def test_splash_attention_of_a_part_of_the_queries(
    part, order, window, most_fused, monkeypatch
):
    """With documents where there is a window; dq may have a kernel of its own."""
    monkeypatch.setattr(attention_kernels, "MOST_FUSED", most_fused)
    q, k, v = arrays(heads=2, kv_heads=1)
    places = device_order(order, 256, 2)
    own = places.reshape(2, 128)[part]
    documents = jnp.repeat(jnp.arange(3)[None], jnp.array([90, 120, 46]), axis=1)
    segments = jnp.broadcast_to(documents, q.shape[:2])

    @jax.jit
    def of_part(number, q, k, v):
        options = dict(part=number, places=places, window=window, interpret=True)
        kernel = functools.partial(attention_kernels.splash_by_heads, **options)
        more = (segments[:, own], segments) if window else ()
        others = [(x, attention_kernels.SEGMENT_NAMES) for x in more]

        def run(*qkv):
            return attention_kernels.splash(kernel, *qkv, others=others)

        return run(q, k, v), gradients(run, q, k, v)

    def plain(q_own, k, v):
        whole = attention_kernels.reference(
            q.at[:, own].set(q_own), k, v, segments if window else None, window=window
        )
        return whole[:, own]

    y, got = of_part(part, q[:, own], k, v)
    np.testing.assert_allclose(y, plain(q[:, own], k, v), rtol=2e-4, atol=2e-5)
    for gradient, expected in zip(got, gradients(plain, q[:, own], k, v), strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    "remat, runs", [("full", 2), ("dots", 1), ("attention", 1), ("names:attention", 1)]
)
@pytest.mark.parametrize("manual", [(), ("data", "tensor")])
def test_a_kernel_runs_forward_once_where_its_results_are_kept(manual, remat, runs):
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    @jax.custom_vjp
    def kernel(q, k, v):
        return forward(q, k, v)[0]

    def forward(q, k, v):
        y = jnp.sort(attention_kernels.reference(q, k, v))  # Nothing else sorts.
        return y, (q, k, v, y, y.sum(-1))

    def backward(saved, dy):
        q, k, v, y, sums = saved
        return q * sums[..., None] + dy, k + y.sum(), v

    kernel.defvjp(forward, backward)

    def layer(*arrays):
        with layouts.use(layouts.parse("data=1"), mesh, manual):
            names = ("batch", "length", "heads", "head_dim")
            y = kernels.on_shards(kernel, names, *arrays, saves=CUDNN)
            return jnp.sin(y).sum()

    with jax.set_mesh(mesh):
        step = jax.value_and_grad(wrap_remat(layer, remat), argnums=(0, 1, 2))
        jaxpr = jax.make_jaxpr(step)(*arrays(length=8, dim=4)).jaxpr
    jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    sorts = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "sort"]
    assert len(sorts) == runs


@pytest.mark.parametrize(
    "remat, runs",
    [("full", 2), ("dots", 1), slow("attention", 1), slow("names:attention", 1)],
)
def test_splash_runs_forward_once_where_its_results_are_kept(remat, runs, monkeypatch):
    """And its gradients are those of plain jnp, whatever is computed again."""
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    splash = functools.partial(attention_kernels.splash_by_heads, interpret=True)
    monkeypatch.setattr(attention_kernels, "splash_by_heads", splash)
    monkeypatch.setattr(attention_kernels, "traced_platform", lambda: platform.TPU)

    def layer(attention, q, k, v):
        with layouts.use(layouts.parse("data=1"), mesh, ()):
            return jnp.sin(attention(jnp.sin(q), k, v)).sum()

    def step(attention, remat):
        run = wrap_remat(functools.partial(layer, attention), remat)
        return jax.value_and_grad(run, argnums=(0, 1, 2))

    qkv = arrays(heads=2, kv_heads=1, length=128, dim=64)
    with jax.set_mesh(mesh):
        run = jax.jit(step(attention_kernels.by_platform, remat))
        jaxpr = jax.make_jaxpr(run)(*qkv).jaxpr
        found = run(*qkv)
        expected = jax.jit(step(attention_kernels.reference, "none"))(*qkv)
    jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    names = [
        str(e.params) for e in equations(jaxpr) if e.primitive.name == "pallas_call"
    ]
    assert len([name for name in names if "splash_mha_fwd" in name]) == runs
    for x, want in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(x, want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("saves", ["", "attention"])
@pytest.mark.parametrize("manual", [slow(()), ("data", "fsdp")])
def test_a_kernel_on_shards_sees_shards_and_gives_the_same_values(manual, saves):
    layout = layouts.parse("data=2,fsdp=2,tensor=2")
    mesh = jax.make_mesh(
        (2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3
    )
    q, k, v = arrays(length=8, dim=4)
    q, k, v = (jnp.concatenate([x, -x]) for x in (q, k, v))
    shapes = set()

    def kernel(*arrays):
        shapes.add(arrays[0].shape)
        return attention_kernels.reference(*arrays)

    def on_shards(*arrays):
        with layouts.use(layout, mesh, manual):
            names = ("batch", "length", "heads", "head_dim")
            return kernels.on_shards(kernel, names, *arrays, saves=saves)

    def mapped(*arrays):
        if not manual:
            return on_shards(*arrays)
        spec = jax.sharding.PartitionSpec(manual)
        return jax.shard_map(
            on_shards, in_specs=spec, out_specs=spec, axis_names=set(manual)
        )(*arrays)

    with jax.set_mesh(mesh):
        values = jax.jit(lambda *a: (mapped(*a), gradients(mapped, *a)))(q, k, v)
    reference = (
        attention_kernels.reference(q, k, v),
        gradients(attention_kernels.reference, q, k, v),
    )
    for x, expected in zip(*map(jax.tree.leaves, (values, reference)), strict=True):
        np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-5)
    assert shapes == {(1, 8, 2, 4)}


def test_devices_share_kv_heads_that_are_fewer(monkeypatch):
    """Each has copies of those that its queries read, and kernels see these alone."""
    layout, shapes = layouts.parse("fsdp=2,tensor=4"), set()
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def kernel(*qkv, window):
        shapes.add(tuple(x.shape for x in qkv))
        q, k, v = (x.swapaxes(1, 2)[..., :4] for x in qkv)
        # The queries are scaled already, and splash scales nothing.
        return padded(attention_kernels.reference(2 * q, k, v, window=window))

    def padded(y):
        return jnp.pad(y.swapaxes(1, 2), [(0, 0)] * 3 + [(0, 124)])

    monkeypatch.setattr(attention_kernels, "traced_platform", lambda: platform.TPU)
    monkeypatch.setattr(attention_kernels, "splash_by_heads", kernel)

    def attention(*qkv):
        with layouts.use(layout, mesh, ()):
            return context.attention(*qkv, window=96)

    qkv = arrays(8, 2, 128, 4)
    plain = functools.partial(attention_kernels.reference, window=96)
    with jax.set_mesh(mesh):
        values = jax.jit(lambda *a: (attention(*a), gradients(attention, *a)))(*qkv)
    assert shapes == {((1, 2, 128, 128), (1, 1, 128, 128), (1, 1, 128, 128))}
    expected = plain(*qkv), gradients(plain, *qkv)
    for x, want in zip(*map(jax.tree.leaves, (values, expected)), strict=True):
        np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-5)


def test_outside_a_layout_the_platform_is_the_default_backend():
    assert platform.traced_platform() is platform.CPU
    q, k, v = arrays(length=8, dim=4)
    np.testing.assert_array_equal(
        context.attention(q, k, v), attention_by_heads(q, k, v)
    )


@pytest.mark.parametrize(
    "order, busiest, total",
    [slow(ZIGZAG, 1.0, 1.0), slow(STRIPED, 1.0, 1.1), (CONTIGUOUS, 1.7, 1.0)],
)
def test_orders_of_tokens_share_the_work_of_splash(order, busiest, total):
    """By the blocks that the kernel computes on each of four devices."""
    length, num = 16_384, 4
    mask = attention_kernels.splash_mask(length, 0, device_order(order, length, num))
    kernel = attention_kernels.splash_kernel([mask], num)
    for info in (kernel.fwd_mask_info, kernel.dkv_mask_info):
        tables = np.asarray(info.block_mask)[0].reshape(num, -1)
        blocks = np.count_nonzero(tables, axis=1)
        assert blocks.max() / blocks.mean() == pytest.approx(busiest, abs=0.03)
        rows = length // 512
        assert blocks.sum() / (rows * (rows + 1) / 2) == pytest.approx(total, abs=0.03)
