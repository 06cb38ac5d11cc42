"""Mixtures of experts on one device equal a loop over tokens; what is refused."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.marks import slow

from meshpar import layouts, mesh
from meshpar.errors import MeshparError
from meshpar.jaxprs.walk import equations
from meshpar.models.model_scope import model_scope
from meshpar.ops import experts
from meshpar.ops.experts import dropless
from meshpar.ops.experts.capacity import run_with_capacity
from meshpar.ops.experts.dropless import run_dropless
from meshpar.ops.experts.exchange import Exchange
from meshpar.ops.experts.grouped_matmul import (
    BLOCK,
    by_ragged_dot,
    by_ragged_dots,
    in_blocks,
)
from meshpar.ops.experts.rows import ZEROS, Missing, inverse_index, take_rows
from meshpar.ops.experts.statistics import Lost, Statistics, statistics_of

B, L, D, F, E = 2, 8, 6, 10, 4
CAPACITY = experts.MixtureConfig(E, 2, capacity_factor=1.0)
DROPLESS = dataclasses.replace(CAPACITY, routing="dropless")


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def weights(gated=True):
    gate = normal(3, E, D, F) if gated else None
    return experts.Experts(normal(1, E, D, F), normal(2, E, F, D), gate)


def silu(x):
    return x / (1 + np.exp(-x))


mixture = jax.jit(experts.mixture, static_argnums=3)


def reference(x_BLD, router_DE, matrices, config):
    """(y, choices of each expert, number of drops), token by token."""
    routing = jax.jit(experts.route, static_argnums=2)(x_BLD, router_DE, config)
    x_BLD, matrices, routing = jax.tree.map(np.asarray, (x_BLD, matrices, routing))
    y, loads, drops = np.zeros_like(x_BLD), np.zeros(E), 0
    num_slots = config.capacity(x_BLD.shape[1])
    for b in range(len(x_BLD)):
        used = np.zeros(E, int)
        for choice in range(config.experts_per_token):  # First choices first.
            for token in range(x_BLD.shape[1]):
                e, x = routing.experts[b, token, choice], x_BLD[b, token]
                loads[e] += 1
                used[e] += 1
                if config.routing == "capacity" and used[e] > num_slots:
                    drops += 1
                    continue
                h = x @ matrices.up[e]
                h = silu(h) if matrices.gate is None else h * silu(x @ matrices.gate[e])
                y[b, token] += routing.weights[b, token, choice] * (
                    h @ matrices.down[e]
                )
    return y, loads, drops


@pytest.mark.parametrize("config", [CAPACITY, DROPLESS], ids=lambda c: c.routing)
@pytest.mark.parametrize("tokens", [slow(1), L])
def test_a_mixture_equals_a_loop_over_tokens(config, tokens):
    x, router, matrices = normal(0, B, tokens, D), normal(4, D, E), weights(tokens > 1)
    mixed = mixture(x, router, matrices, config)
    y, loads, drops = reference(x, router, matrices, config)
    np.testing.assert_allclose(mixed.y, y, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(mixed.load, loads)
    choices = B * tokens * 2
    assert float(mixed.statistics.dropped) == pytest.approx(drops / choices)
    assert (drops > 0) == (config is CAPACITY and tokens > 1)
    assert float(mixed.statistics.load) == pytest.approx(E * max(loads) / choices)


def test_more_experts_cost_no_more_compute():
    """With as many experts per token: all of their matmuls count, and no others."""

    def flops(num):
        config = experts.MixtureConfig(num, 2, capacity_factor=1.0)
        matrices = [normal(i, num, *shape) for i, shape in enumerate([(64, 128)] * 2)]
        matrices = experts.Experts(matrices[0], matrices[1].swapaxes(1, 2))

        def loss(x, router, matrices):
            return jnp.sum(experts.mixture(x, router, matrices, config).y ** 2)

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        lowered = gradient.lower(normal(5, 4, 64, 64), normal(6, 64, num), matrices)
        return lowered.compile().cost_analysis()["flops"]

    matmuls = 3 * 2 * 2 * (4 * 64) * 2 * 64 * 128
    few, many = flops(4), flops(16)
    assert matmuls < few < many < 1.1 * matmuls


@pytest.mark.slow
@pytest.mark.parametrize("config", [CAPACITY, slow(DROPLESS)], ids=lambda c: c.routing)
def test_all_tokens_may_go_to_one_expert(config):
    config = dataclasses.replace(config, experts_per_token=1)
    x = jnp.abs(normal(0, B, L, D))
    router = jnp.zeros((D, E)).at[:, 2].set(1.0)

    def loss(matrices):
        mixed = experts.mixture(x, router, matrices, config)
        return jnp.sum(jnp.sin(mixed.y)), mixed

    (_, mixed), grads = jax.value_and_grad(loss, has_aux=True)(weights())
    np.testing.assert_array_equal(mixed.load, [0, 0, B * L, 0])
    kept = L // E if config.routing == "capacity" else L
    assert float(mixed.statistics.dropped) == 1 - kept / L
    np.testing.assert_array_equal(np.any(mixed.y != 0, axis=-1).sum(axis=1), kept)
    for gradient in grads:
        idle = np.delete(np.asarray(gradient), 2, axis=0)
        np.testing.assert_array_equal(idle, 0)
        assert np.all(np.isfinite(gradient)) and np.any(gradient[2] != 0)


@pytest.mark.parametrize("config", [CAPACITY, DROPLESS], ids=lambda c: c.routing)
def test_experts_in_another_order_give_the_same_outputs(config):
    x, router, matrices = normal(0, B, L, D), normal(4, D, E), weights()
    order = np.array([2, 0, 3, 1])
    permuted = jax.tree.map(lambda w: w[order], matrices)
    before = mixture(x, router, matrices, config)
    after = mixture(x, router[:, order], permuted, config)
    np.testing.assert_allclose(after.y, before.y, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(after.load, before.load[order])


@pytest.mark.parametrize("dispatched", [slow(run_with_capacity), run_dropless])
def test_rows_without_a_token_reach_no_output(dispatched):
    """Whatever experts make of them: numbers that are none, in both passes."""
    x, router = normal(0, B, L, D), normal(4, D, E)
    routing = experts.route(x, router, CAPACITY)
    weights_TX = routing.weights.reshape(-1, 2)

    def outputs(x_TD, padding):
        def run(rows, row_weights, _):
            used = row_weights[..., None] > 0
            return jnp.where(used, rows * row_weights[..., None], padding)

        one = Exchange(1)
        return dispatched(x_TD, routing.experts, weights_TX, CAPACITY, one, run)[0]

    @jax.jit
    def both_passes(x_TD, padding):
        y_TD, pull = jax.vjp(lambda x_TD: outputs(x_TD, padding), x_TD)
        return y_TD, *pull(jnp.cos(y_TD))

    x_TD = x.reshape(-1, D)
    for got, want in zip(
        both_passes(x_TD, jnp.nan), both_passes(x_TD, 0.0), strict=True
    ):
        np.testing.assert_array_equal(got, want)
        assert np.any(want != 0)


def test_the_most_loaded_device_is_that_of_its_experts():
    x = jnp.ones((1, 1, 1))
    routing = experts.route(x, jnp.array([[1.0, 3.0, 2.0, 0.0]]), CAPACITY)
    lost = Lost(jnp.zeros(()), jnp.zeros(()))
    loads = [statistics_of(routing, lost, (), n)[0].device_load for n in (1, 2, 4)]
    np.testing.assert_allclose(loads, [1.0, 1.0, 2.0])  # Experts 1 and 2 are chosen.
    high = experts.route(x, jnp.array([[3.0, 2.0, 1.0, 0.0]]), CAPACITY)
    assert float(statistics_of(high, lost, (), 2)[0].device_load) == 2.0


@pytest.mark.parametrize("matmul", [in_blocks, by_ragged_dot])
def test_rows_beyond_the_groups_are_never_read(matmul):
    sizes = jnp.array([BLOCK, 0, 2 * BLOCK], jnp.int32)
    x, w = normal(0, 5 * BLOCK, D), normal(1, 3, D, F)
    used = 3 * BLOCK
    poisoned = x.at[used:].set(jnp.nan)

    def loss(x, w):
        y = matmul(x, w, sizes)
        return jnp.sum(jnp.sin(y[:used])), y

    gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, y), (dx, dw) = gradients(poisoned, w)
    groups = np.repeat([0, 2, 2], BLOCK)
    expected = np.einsum("sd,sdf->sf", x[:used], np.asarray(w)[groups])
    np.testing.assert_allclose(y[:used], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(y[used:], 0)
    np.testing.assert_array_equal(dw[1], 0)
    assert np.all(np.isfinite(dw)) and np.all(np.isfinite(dx))


def test_the_gradient_of_take_rows_is_that_of_a_plain_gather():
    slots = jnp.array([4, 0, 7, 2, 7, 1], jnp.int32)  # 7 is no slot.
    index = inverse_index(slots, 7)[:, None]
    np.testing.assert_array_equal(index[:, 0], [1, 5, 3, 6, 0, 6, 6])
    x, pull = normal(0, 6, D), normal(1, 7, D)
    gradient = jax.grad(lambda x: jnp.sum(pull * take_rows(x, index, slots[:, None])))
    slots = np.asarray(slots)
    expected = np.where((slots < 7)[:, None], np.asarray(pull)[np.minimum(slots, 6)], 0)
    np.testing.assert_allclose(jax.jit(gradient)(x), expected)


def test_missing_rows_are_zeros_unless_any_row_will_do():
    """Forward as the first, backward as the second part of `Missing` says."""
    x, index = normal(0, 3, D), jnp.array([[0, 3], [2, 1]], jnp.int32)
    inverse = jnp.array([[0], [1], [2]], jnp.int32)  # 2 is no row of the result.

    @functools.partial(jax.jit, static_argnums=0)
    def taken(missing):
        y, vjp = jax.vjp(lambda x: take_rows(x, index, inverse, missing), x)
        return y, vjp(jnp.ones((2, D)))[0]

    y, dx = taken(Missing())
    np.testing.assert_allclose(y, jnp.stack([x[0], x[1] + x[2]]), rtol=1e-6)
    np.testing.assert_array_equal(dx, jnp.ones((3, D)).at[2].set(0))
    others_y, others_dx = taken(Missing(False, False))
    np.testing.assert_array_equal(others_y[1], y[1])
    np.testing.assert_array_equal(others_dx[:2], dx[:2])
    assert np.all(others_y[0] != y[0]) and np.all(others_dx[2] != 0)


def test_empty_slots_change_nothing():
    """What stands in slots that no choice has changes neither outputs nor gradients."""
    config = experts.MixtureConfig(E, 2)
    x, router = normal(0, B, L, D), normal(4, D, E)
    weights = experts.Experts(
        normal(1, E, D, F), normal(2, E, F, D), normal(3, E, D, F)
    )

    def loss(x, weights):
        return jnp.sum(jnp.sin(experts.mixture(x, router, weights, config).y))

    def gradients():
        return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, (0, 1)))(x, weights))

    found = gradients()
    with mock.patch.object(dropless, "Missing", lambda *_: ZEROS):
        expected = gradients()
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        assert np.any(want != 0)


@pytest.mark.parametrize("rows", [3, 40])
def test_several_matrices_have_the_gradients_of_each(rows):
    """Many rows have one gradient for all matrices, few rows one for each."""
    sizes = jnp.array([BLOCK, 0, 2 * BLOCK], jnp.int32)
    x = normal(0, rows * BLOCK, D)
    weights = tuple(normal(i, 3, D, 4 * F) for i in (1, 2))
    assert (2 * weights[0].size < x.size) == (rows == 40)

    def loss(matmuls, x, weights):
        up, gate = matmuls(x, weights, sizes)
        return jnp.sum(jnp.sin(up) * gate)

    def each(x, weights, sizes):
        return [jax.lax.ragged_dot(x, w, sizes) for w in weights]

    gradient = jax.jit(jax.grad(loss, (1, 2)), static_argnums=0)
    both = (gradient(m, x, weights) for m in (by_ragged_dots, each))
    for got, want in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
        assert np.any(want != 0)


@pytest.mark.parametrize(
    "layout, forward, backward",
    [
        ("pipe=2", (0, 1, 2), (0, 1, 2)),
        ("pipe=2,fsdp=2,zero=3", (0, 1, 2), (0, 2, 1)),
        ("fsdp=2,zero=3", None, None),
    ],
)
def test_matrices_of_pipelines_have_the_order_that_kernels_read(
    layout, forward, backward
):
    layout = layouts.parse(layout)
    x, sizes = normal(0, 2 * BLOCK, D), jnp.array([BLOCK, BLOCK], jnp.int32)
    matrices = (normal(1, 2, D, F),)

    def orders(fn):
        devices = jax.devices()[: layout.num_devices]
        with model_scope(layout, mesh.make_mesh(layout, devices)):
            eqns = equations(jax.make_jaxpr(fn)(x, matrices).jaxpr)
            found = [eqn.params.get("layout") for eqn in eqns]
        return [known.major_to_minor for known in found if known]

    def run(x, matrices):
        return jnp.sum(by_ragged_dots(x, matrices, sizes)[0])

    assert orders(run) == ([forward] if forward else [])
    both = [forward, backward] if forward else []
    assert orders(jax.grad(run)) == both


def test_the_router_prefers_lower_numbers_and_better_nodes():
    x, router = jnp.ones((1, 1, 1)), jnp.array([[1.0, 1.0, 0.5, 1.2]])
    config = experts.MixtureConfig(4, 2)
    assert experts.route(x, router, config).experts.tolist() == [[[3, 0]]]
    limited = dataclasses.replace(config, num_nodes=2)
    assert experts.route(x, router, limited).experts.tolist() == [[[0, 1]]]
    sigmoid = dataclasses.replace(config, score="sigmoid", normalize=False, scale=2.0)
    routing = experts.route(x, router, sigmoid)
    np.testing.assert_allclose(
        routing.weights[0, 0], 2 * jax.nn.sigmoid(jnp.array([1.2, 1.0]))
    )


def test_a_bias_changes_the_choice_but_not_the_weights():
    x, router = jnp.ones((1, 1, 1)), jnp.array([[0.0, 1.0, 2.0, 3.0]])
    config = experts.MixtureConfig(4, 1, normalize=False)
    bias = jnp.array([9.0, 0, 0, 0])
    routing = experts.route(x, router, config, bias_E=bias)
    assert int(routing.experts[0, 0, 0]) == 0
    assert float(routing.weights[0, 0, 0]) == float(routing.shares[0, 0, 0])
    load = jnp.array([4.0, 0, 2, 2])
    after = experts.balanced_bias(jnp.zeros(4), load, 0.1)
    np.testing.assert_allclose(after, [-0.1, 0.1, 0, 0])


def test_jitter_is_noise_in_training_alone():
    x, router = normal(0, B, L, D), normal(4, D, E)
    config = experts.MixtureConfig(E, 2, jitter=0.5)
    plain = experts.route(x, router, config)
    noisy = experts.route(x, router, config, key=jax.random.key(0))
    assert np.all(noisy.logits != plain.logits)
    ratio = experts.route(
        jnp.ones((B, L, 1)), jnp.ones((1, E)), config, key=jax.random.key(0)
    )
    assert 0.5 <= float(ratio.logits.min()) < float(ratio.logits.max()) <= 1.5


def test_bad_configurations_are_refused():
    for values, text in (
        (dict(capacity_factor=0), "leaves no expert a slot"),
        (dict(routing="sparse"), "use one of"),
        (dict(experts_per_token=9), "1 to num_experts=4"),
        (dict(jitter=1.0), "0 <= jitter < 1"),
        (dict(bound=-1), "use 0 or more"),
        (dict(num_nodes=3), "must divide"),
        (dict(num_nodes=4, nodes_per_token=1), "fewer than"),
    ):
        with pytest.raises(MeshparError, match=text):
            experts.MixtureConfig(**{"num_experts": E, **values})
    with pytest.raises(MeshparError, match="does not divide sequences of 8"):
        experts.MixtureConfig(E, group=3).capacity(8)


def test_gradients_of_the_largest_loads_compare_nothing():
    """They are zero; what a comparison reads would be computed and summed again."""

    def total(own, earlier):
        return jnp.sum(Statistics(*own).after(earlier))

    args = jnp.arange(7.0), jnp.ones(7)
    jaxpr = jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(*args)
    names = {eqn.primitive.name for eqn in equations(jaxpr.jaxpr)}
    assert not names & {"eq", "gt", "lt", "select_n"}
