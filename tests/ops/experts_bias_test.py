"""DeepSeek-V3's bias: a parameter that follows exact loads, or state of a model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.tiny_models import batch, lower, model

import meshpar
from meshpar.errors import MeshparError
from meshpar.ops import experts

B, L, D, F, E, RATE = 8, 6, 8, 16, 8, 0.01
CONFIG = experts.MixtureConfig(E, 2, routing="dropless", score="sigmoid")


class Net(nnx.Module):
    def __init__(self, rngs):
        def weight(names, *shape):
            value = jax.random.normal(rngs.params(), shape)
            return nnx.Param(value, out_sharding=names)

        self.router = weight(("embed", None), D, E)
        self.up = weight(("expert", "embed", "mlp"), E, D, F)
        self.down = weight(("expert", "mlp", "embed"), E, F, D)
        self.bias = nnx.Variable(jnp.zeros(E))

    def __call__(self, x_BLD):
        weights = experts.Experts(self.up[...], self.down[...])
        mixed = experts.mixture(
            x_BLD, self.router[...], weights, CONFIG, bias_E=self.bias[...]
        )
        self.bias[...] = experts.balanced_bias(self.bias[...], mixed.load, RATE)
        return mixed.y


def trained(layout, steps=6):
    """{path: array} after some steps."""
    random = np.random.default_rng(0)
    batch = {"x": np.float32(random.normal(size=(B, L, D)))}
    model = meshpar.from_nnx(Net, lambda net, batch: jnp.mean(net(batch["x"]) ** 2))
    program = meshpar.lower(model, optax.sgd(1e-3), layout, batch)
    state = program.init(seed=0)
    for _ in range(steps):
        state, _ = program.step(state, batch)
    return jax.device_get(state.params)


def test_the_bias_follows_the_counts_of_the_whole_batch():
    one, many = trained("data=1,allow=idle_devices"), trained("fsdp=2,expert=4")
    for path, x in one.items():
        np.testing.assert_allclose(many[path], x, rtol=1e-5, atol=1e-6)
    steps = one["bias"] / RATE
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-4)
    assert len(set(np.round(steps))) > 2


@pytest.mark.slow
def test_loads_are_exact_in_bfloat16_and_count_for_no_norm():
    of = model(num_experts=E, mlp=32, router_bias=True, routing="dropless")
    optimizer = experts.balanced(optax.adamw(1e-2), of, RATE)
    options = dict(clip_norm=1e-3, compute_dtype=jnp.bfloat16)
    program = lower("fsdp=2,expert=4", of, optimizer, **options)
    state = program.init(0)
    metrics, gradients = jax.device_get(program.gradients(state, batch()))
    (path,) = (path for path in gradients if path.endswith("router_bias"))
    load = gradients[path]
    choices = 2 * batch()["tokens"].size
    np.testing.assert_array_equal(load * choices, np.round(load * choices))
    np.testing.assert_array_equal(load.sum(axis=1), 1)
    even = choices // E
    state, metrics = program.step(state, batch())
    steps = RATE * np.sign(even - load * choices)
    np.testing.assert_array_equal(state.params[path], np.float32(steps))
    others = [np.float64(g) for p, g in gradients.items() if p != path]
    norm = np.sqrt(sum(np.sum(g**2) for g in others))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    assert program.violations() == []


def test_a_bias_evens_out_the_loads():
    x = jax.random.normal(jax.random.key(0), (B, 8 * L, D)).at[..., 0].set(1.0)
    router = jax.random.normal(jax.random.key(1), (D, E)) / 2
    router = router.at[0].set(jnp.linspace(0, 3, E))  # The last ones are liked best.
    of = model(num_experts=E, router_bias=True)
    (path,) = (path for path in of.params if path.endswith("router_bias"))
    optimizer = experts.balanced(optax.sgd(1.0), of, RATE)
    params = {path: jnp.zeros((1, E))}
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        chosen = experts.route(x, router, CONFIG, bias_E=params[path][0]).experts
        load = jnp.bincount(chosen.reshape(-1), length=E)
        gradient = {path: 7.0 * load.astype(jnp.float32)[None]}
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, load

    loads = []
    for _ in range(60):
        params, state, load = step(params, state)
        loads.append(float(load.max() / load.mean()))
    assert loads[0] > 2.5 and max(loads[-5:]) < 1.5
    with pytest.raises(MeshparError, match="name the dim of one 'expert_load'"):
        experts.balanced(optax.sgd(1.0), model(num_experts=E), RATE)
