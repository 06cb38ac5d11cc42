"""Batches over `data` and `fsdp`, weights over `fsdp` and `tensor`: jit equals jax.

XLA's own gathers of such weights give wrong gradients, and sometimes a wrong loss, in
models that do not constrain their activations.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.marks import first

import meshpar


def weight(rngs, names, *shape):
    return nnx.Param(rngs.params.normal(shape) / 4, out_sharding=names)


class Matmuls(nnx.Module):
    inputs, outputs = (64, 48), (64, 48)

    def __init__(self, rngs):
        self.up = weight(rngs, ("embed", "mlp"), 48, 48)
        self.down = weight(rngs, ("embed", "mlp"), 48, 48)

    def __call__(self, x_BD):
        return jnp.tanh(jnp.tanh(x_BD @ self.up[...]) @ self.down[...])


class Layers(nnx.Module):
    """Three gated layers under a scan."""

    inputs, outputs = (16, 8), (16, 8)

    def __init__(self, rngs):
        self.gate = weight(rngs, ("layers", "embed", "mlp"), 3, 8, 16)
        self.up = weight(rngs, ("layers", "mlp", "embed"), 3, 8, 16)
        self.down = weight(rngs, ("layers", "mlp", "embed"), 3, 16, 8)

    def __call__(self, x_BD):
        def layer(x_BD, weights):
            gate, up, down = weights
            return x_BD + (nnx.silu(x_BD @ gate) * (x_BD @ up)) @ down, None

        weights = self.gate[...], self.up[...], self.down[...]
        return jax.lax.scan(layer, x_BD, weights)[0]


class Attention(nnx.Module):
    inputs, outputs = (8, 8, 8), (8, 8, 8)

    def __init__(self, rngs):
        names = ("embed", "heads", "kv")
        self.inward = nnx.List([weight(rngs, names, 8, 2, 8) for _ in range(3)])
        self.outward = weight(rngs, ("heads", "kv", "embed"), 2, 8, 8)
        self.up = weight(rngs, ("mlp", "embed"), 8, 32)
        self.down = weight(rngs, ("mlp", "embed"), 32, 8)

    def __call__(self, x_BLD):
        heads = (jnp.einsum("bld,dhk->blhk", x_BLD, w[...]) for w in self.inward)
        read = jax.nn.dot_product_attention(*heads, is_causal=True)
        x_BLD += jnp.einsum("blhk,hkd->bld", read, self.outward[...])
        return x_BLD + nnx.gelu(x_BLD @ self.up[...]) @ self.down[...]


class Convolutions(nnx.Module):
    inputs, outputs = (32, 6, 6, 8), (32, 8)

    def __init__(self, rngs):
        self.first = weight(rngs, (None, None, "embed", None), 3, 3, 8, 8)
        self.second = weight(rngs, (None, None, "embed", "mlp"), 3, 3, 8, 16)
        self.head = weight(rngs, ("embed", "mlp"), 16, 8)

    def __call__(self, x_BHWC):
        for kernel in (self.first[...], self.second[...]):
            x_BHWC = jax.lax.conv_general_dilated(
                x_BHWC,
                kernel,
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
        return x_BHWC.mean((1, 2)) @ self.head[...]


def loss_fn(module, batch):
    return jnp.square(module(batch["x"]) - batch["y"]).mean()


@pytest.mark.parametrize("kind", first(2, [Matmuls, Convolutions, Layers, Attention]))
def test_gradients_and_loss_are_those_of_one_device(kind):
    rng = np.random.default_rng(0)
    shapes = {"x": kind.inputs, "y": kind.outputs}
    batch = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    model = meshpar.from_nnx(kind, loss_fn)
    program = meshpar.lower(
        model, optax.sgd(1.0), "data=2,fsdp=2,tensor=2", batch, lowering="jit"
    )
    state = program.init(0)
    before = jax.device_get(state.params)

    def loss(params):
        return model.evaluation_loss(params, batch).loss

    want, gradients = jax.jit(jax.value_and_grad(loss))(jax.tree.map(jnp.array, before))
    state, metrics = program.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    for path, gradient in gradients.items():
        got = before[path] - np.asarray(state.params[path])
        error = np.linalg.norm(got - gradient) / np.linalg.norm(gradient)
        assert error < 1e-4, (path, error)


class Biased(nnx.Module):
    def __init__(self, rngs):
        self.up = weight(rngs, ("embed", "mlp"), 48, 48)
        self.down = weight(rngs, ("mlp", "embed"), 48, 48)
        self.biases = weight(rngs, (None, None, "mlp"), 2, 1, 48)

    def __call__(self, x_BD):
        first, second = self.biases[...]
        h_BF = nnx.gelu(x_BD @ self.up[...] + first)
        return nnx.gelu(h_BF @ self.down[...] + second)


class Listed(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Biased(rngs) for _ in range(2)])

    def __call__(self, x_BD):
        for layer in self.layers:
            x_BD = layer(x_BD)
        return x_BD


@pytest.mark.parametrize("lowering", first(1, ["shard_map", "jit"]))
def test_predictions_and_evaluation_are_those_of_one_device(lowering):
    """An evaluation loss of the model's own and predictions run outside shard_map."""
    x = np.random.default_rng(0).normal(size=(32, 48)).astype(np.float32)
    batch = {"x": x, "y": x}
    model = meshpar.from_nnx(Listed, loss_fn, lambda *a: loss_fn(*a), layers="layers")
    program = meshpar.lower(
        model, optax.sgd(1.0), "data=2,fsdp=2,tensor=2", batch, lowering=lowering
    )
    state = program.init(0)
    module = model.bind(jax.tree.map(jnp.array, jax.device_get(state.params)))
    want = loss_fn(module, batch)
    predicted = program.predictor(loss_fn)(state.params, batch)
    np.testing.assert_allclose(predicted, want, rtol=1e-5)
    evaluated = program.evaluate(state, batch)["loss"]
    np.testing.assert_allclose(evaluated, want, rtol=1e-5)
