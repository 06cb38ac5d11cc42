"""Loss functions that ask for a random key or for the number of steps done."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.marks import slow

import meshpar

SIZE, DEPTH = 16, 4


class Denoiser(nnx.Module):
    def __init__(self, rngs):
        dims = {"out_sharding": ("embed", "mlp")}
        self.blocks = nnx.List(
            [
                nnx.Linear(SIZE, SIZE, use_bias=False, kernel_metadata=dims, rngs=rngs)
                for _ in range(DEPTH)
            ]
        )

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def diffusion_loss(model, batch, key=None, step=0):
    """The noise enters the model's input and the target: both need the same key."""
    noise = 0 if key is None else jax.random.normal(key, batch["x"].shape)
    scale = 1.0 / (1.0 + step)
    return scale * jnp.square(model(batch["x"] + noise) - noise).mean()


def batch():
    return {"x": np.random.default_rng(0).normal(size=(16, SIZE)).astype(np.float32)}


def losses(layout, **options):
    layout = meshpar.layouts.parse(layout)
    model = meshpar.from_nnx(Denoiser, diffusion_loss, **options)
    devices = jax.devices()[: layout.num_devices]
    program = meshpar.lower(model, optax.sgd(0.1), layout, batch(), devices=devices)
    state, found = program.init(), []
    for _ in range(3):
        state, metrics = program.step(state, batch())
        found.append(float(metrics["loss"]))
    return np.array([*found, float(program.evaluate(state, batch())["loss"])])


@pytest.mark.parametrize(
    "layout",
    [slow("data=8"), slow("fsdp=2,tensor=2"), "pipe=2,data=2,microbatches=2"],
)
def test_key_and_step_are_the_same_in_all_parts_of_a_model(layout):
    expected = losses("data=1")
    np.testing.assert_allclose(losses(layout, layers="blocks"), expected, rtol=2e-6)


def always_noisy(model, batch, key):
    x = batch["x"] + jax.random.normal(key, batch["x"].shape)
    return jnp.square(model(x)).mean()


@pytest.mark.parametrize(
    "layers, layout",
    [("", "data=8"), slow("blocks", "data=2"), slow("blocks", "pipe=4,microbatches=2")],
)
def test_a_loss_that_cannot_do_without_a_key_is_told_so_when_it_is_lowered(
    layers, layout
):
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]

    def lower(**options):
        model = meshpar.from_nnx(Denoiser, always_noisy, layers=layers, **options)
        return meshpar.lower(model, optax.sgd(0.1), layout, batch(), devices=devices)

    words = "needs a random key.*evaluation passes none.*evaluation_loss_fn=.*None"
    with pytest.raises(meshpar.MeshparError, match=words):
        lower()
    program = lower(evaluation_loss_fn=diffusion_loss)
    assert program.evaluate(program.init(), batch())["loss"] > 0


def test_other_errors_of_evaluation_pass_unchanged():
    def loss(model, batch, key):
        if key is None:
            raise TypeError("an error of the user's own")
        return jnp.square(model(batch["x"])).mean()

    model = meshpar.from_nnx(Denoiser, loss)
    with pytest.raises(TypeError, match="^an error of the user's own"):
        meshpar.lower(model, optax.sgd(0.1), "data=8", batch())


def test_step_counts_and_key_changes():
    def loss(model, batch, *, step, key):
        draw = 0.0 if key is None else jax.random.uniform(key)
        aux = {"step": meshpar.metrics.Last(step), "draw": meshpar.metrics.Last(draw)}
        return jnp.square(model(batch["x"])).mean(), aux

    model = meshpar.from_nnx(Denoiser, loss)
    program = meshpar.lower(model, optax.sgd(0.1), "data=8", batch())
    state, found = program.init(), []
    for _ in range(3):
        state, metrics = program.step(state, batch())
        found.append((int(metrics["step"]), float(metrics["draw"])))
    assert [step for step, _ in found] == [0, 1, 2]
    assert len({draw for _, draw in found}) == 3
    assert int(program.evaluate(state, batch())["step"]) == 3


def test_a_variable_at_the_path_of_the_step_is_refused():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.training_step = nnx.Param(jnp.ones(3))

    def loss(net, batch, step):
        return step * net.training_step.sum() * batch["x"].mean()

    with pytest.raises(ValueError, match="training_step.*rename"):
        meshpar.from_nnx(Net, loss)
