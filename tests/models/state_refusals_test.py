"""State and parameters that a loss function may not change, and large state."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.state_models import (
    COUNTING,
    WIDTH,
    Counting,
    changing,
    lower,
    squared,
    train,
)
from support.tiny_models import host

import meshpar
from meshpar.explain.report import explain


def test_a_loss_that_changes_a_parameter_is_refused():
    def writing(module, batch):
        module.linear.kernel.set_value(module.linear.kernel.get_value() * 0.5)
        return squared(module, batch)

    with pytest.raises(ValueError, match="changes the parameter 'linear/kernel'"):
        lower(meshpar.from_nnx(Counting, writing), "data=2")

    def applied(apply, batch):
        return jnp.square(apply(batch["x"], mutable=["params"])[0]).mean()

    class Writing(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.ones, (WIDTH,))
            if not self.is_initializing():
                self.put_variable("params", "w", w * 2)
            return x * w[None]

    model = meshpar.from_linen(Writing(), applied, jnp.ones((1, WIDTH)))
    with pytest.raises(ValueError, match="changes the parameter 'w'"):
        lower(model, "data=2")


class Normalizing(nnx.Module):
    """Layers with BatchNorm."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.BatchNorm(WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class LinenNormalizing(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.BatchNorm(False, name=f"layer_{i}")(x)
        return x


def linen_loss(apply, batch):
    return jnp.square(apply(batch["x"], mutable=["batch_stats"])[0] - batch["y"]).mean()


def normalizing(framework, **layers):
    if framework == "nnx":
        return meshpar.from_nnx(Normalizing, squared, **layers)
    x = jnp.ones((1, WIDTH))
    return meshpar.from_linen(LinenNormalizing(), linen_loss, x, **layers)


def test_layers_that_change_state_run_without_their_name(framework):
    layers = {"nnx": "layers", "linen": "layer_*"}[framework]
    with pytest.raises(ValueError, match="under data, fsdp and tensor the state is"):
        lower(normalizing(framework, layers=layers), "fsdp=2")
    states = [
        host(train(lower(normalizing(framework), layout), 2)[0].params)
        for layout in ("data=1", "data=2,fsdp=2")
    ]
    for path, want in states[0].items():
        np.testing.assert_allclose(states[1][path], want, 1e-5, 1e-6, err_msg=path)


@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat], ids=["jit", "remat"])
def test_parameters_handed_through_a_transform_are_not_changed(transform):
    """Flax puts new values into all variables of a module that runs in a transform."""
    plain, model = COUNTING, meshpar.from_nnx(Counting, transform(squared))
    states = [host(train(lower(m, "data=2"), 2)[0].params) for m in (plain, model)]
    for path, want in states[0].items():
        np.testing.assert_allclose(states[1][path], want, 1e-5, 1e-6, err_msg=path)


@pytest.mark.parametrize(
    "value, words",
    [
        (lambda x: x.mean(axis=1), r"float32\[\] to float32\[16\]"),
        (lambda x: jnp.int32(3), r"float32\[\] to int32\[\]"),
    ],
)
def test_state_keeps_its_form(value, words):
    model = changing(lambda old, x: value(x))
    with pytest.raises(ValueError, match=f"variable 'seen' from {words}.*sown"):
        lower(model, "data=2")


def test_large_state_that_is_whole_on_every_device_is_a_warning():
    class Masked(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.ones(WIDTH), out_sharding=("embed",))
            self.mask = jnp.ones((1024, 512), bool)

        def __call__(self, x_BD):
            return x_BD * self.w[...][None] * self.mask[0, 0]

    class Table(Masked):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.mask = jnp.ones((1024, 512))

    small, large = (meshpar.from_nnx(kind, squared) for kind in (Masked, Table))
    assert not [w for w in explain(lower(small, "fsdp=2")).warnings if "mask" in w]
    explanation = explain(lower(large, "fsdp=2"))
    (warning,) = [w for w in explanation.warnings if "mask" in w]
    assert "whole on every device, 2097152 bytes" in warning
    assert explanation.replicated["mask"] == "state: state without dim names"
    split = explain(lower(large, "fsdp=2,paths.mask=embed/none"))
    assert not split.warnings
    assert split.state_bytes < explanation.state_bytes - 2**20 + 1
