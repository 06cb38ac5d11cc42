"""DeepSeek-V3's bias: state of a model under the jit lowering, equal on all layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshpar
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
