"""Results that a step sows are no state, and layers that run one by one sow none."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.linen import partitioning
from support import resnets
from support.state_models import WIDTH, lower, rows, squared

import meshpar


@pytest.mark.parametrize("how", ["linen", "nnx.capture", "nnx.pop"])
@pytest.mark.filterwarnings("ignore:Using 'Module.sow\\(\\)' outside")
def test_sown_results_reach_the_loss_and_are_not_carried_along(how):
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x_BD):
            w = self.param("w", nn.initializers.ones, (WIDTH,))
            y_BD = x_BD * w[None]
            self.sow(
                "losses", "penalty", jnp.square(w).sum(), lambda a, b: a + b, float
            )
            self.sow("intermediates", "y", y_BD)
            return y_BD

    class Nnx(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.ones(WIDTH))

        def __call__(self, x_BD):
            y_BD = x_BD * self.w[...][None]
            self.sow(nnx.Intermediate, "penalty", jnp.square(self.w[...]).sum())
            self.sow(nnx.Intermediate, "y", y_BD)
            return y_BD

    def total(y_BD, penalty, sown_BD):
        return jnp.square(y_BD).mean() + 0.1 * penalty + sown_BD.mean()

    def linen_loss(apply, batch):
        y_BD, sown = apply(batch["x"], mutable=["losses", "intermediates"])
        return total(y_BD, sown["losses"]["penalty"], *sown["intermediates"]["y"])

    def nnx_loss(module, batch):
        if how == "nnx.capture":
            y_BD, sown = nnx.capture(module, nnx.Intermediate)(batch["x"])
        else:
            y_BD = module(batch["x"])
            sown = nnx.pop(module, nnx.Intermediate)
        return total(y_BD, *(sown[name][0] for name in ("penalty", "y")))

    if how == "linen":
        model = meshpar.from_linen(Linen(), linen_loss, jnp.ones((1, WIDTH)))
    else:
        model = meshpar.from_nnx(Nnx, nnx_loss)
    assert set(model.params) == {"w"}
    program, x = lower(model, "data=8"), jnp.asarray(rows()["x"])

    def plain(w):
        return total(x * w[None], jnp.square(w).sum(), x * w[None])

    want, gradient = jax.value_and_grad(plain)(jnp.ones(WIDTH))
    state = program.init(0)
    metrics, gradients = program.gradients(state, rows())
    assert float(metrics["loss"]) == pytest.approx(float(want), rel=1e-5)
    np.testing.assert_allclose(gradients["w"], gradient, rtol=1e-5)


class CountingLayer(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones(WIDTH), out_sharding=("embed",))
        self.count = nnx.Variable(jnp.zeros(()))


class Layers(nnx.Module):
    def __init__(self, rngs):
        metadata = {nnx.PARTITION_NAME: "layers"}
        make = nnx.vmap(CountingLayer, transform_metadata=metadata)
        self.layers = make(rngs.split(2))


@pytest.mark.filterwarnings("ignore:Using 'Module.sow\\(\\)' outside")
def test_layers_that_run_one_by_one_neither_change_state_nor_sow():
    def count(layer, x_BD):
        layer.count.set_value(layer.count.get_value() + 1)
        return x_BD * layer.w[...][None]

    def sow(layer, x_BD):
        layer.sow(nnx.Intermediate, "x", x_BD)
        return x_BD * layer.w[...][None]

    for layer, words in (
        (count, "changes its variable 'layers/count'"),
        (sow, "sows 'layers/x'"),
    ):
        stack = meshpar.LayerStack(
            stack="layers",
            embed=lambda net, batch: batch["x"],
            layer=layer,
            head_loss=lambda net, x_BD, batch: jnp.square(x_BD - batch["y"]).mean(),
        )
        with pytest.raises(ValueError, match=words):
            lower(meshpar.from_nnx(Layers, stack), "data=2")


@pytest.mark.parametrize("mutable", [True, nn.DenyList("params"), "batch_stats"])
def test_flax_filters_say_which_collections_are_returned(mutable):
    def loss(apply, batch):
        logits, new = apply(batch["image"], mutable=mutable)
        assert "batch_stats" in new
        return resnets.cross_entropy(logits, batch)

    example = jnp.zeros((1, resnets.SIDE, resnets.SIDE, 8))
    model = meshpar.from_linen(
        resnets.LinenResNet(), loss, example, resnets.linen_evaluation
    )
    found = jax.eval_shape(
        lambda: model.loss(
            model.init(jax.random.key(0)), resnets.batch(), jax.random.key(1)
        )
    )
    assert len(found.state) == 4


def test_axes_kept_beside_the_variables_name_their_dims():
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x_BD):
            w = partitioning.param_with_axes(
                "w", nn.initializers.ones, (WIDTH, WIDTH), axes=("embed", "mlp")
            )
            table = partitioning.variable_with_axes(
                "tables", "table", jnp.ones, (WIDTH, WIDTH), axes=(None, "embed")
            )
            return x_BD @ (w * table.value)

    model = meshpar.from_linen(Named(), squared, jnp.ones((1, WIDTH)))
    assert {path: param.names for path, param in model.params.items()} == {
        "w": ("embed", "mlp"),
        "tables/table": (None, "embed"),
    }
    plan = lower(model, "fsdp=2,tensor=2").plan
    assert plan.parameters["w"].spec == (("fsdp",), ("tensor",))
    assert plan.parameters["tables/table"].spec == ((), ("fsdp",))


def test_a_collection_may_hold_state_and_what_is_sown():
    """Classes of Flax stay as they are: the modules' own `sow` is watched."""

    class Both(nn.Module):
        @nn.compact
        def __call__(self, x_BD):
            self.variable("kept", "mean", jnp.zeros, (WIDTH,))
            self.sow("kept", "last", x_BD.mean(), lambda a, b: b, float)
            return x_BD * self.param("w", nn.initializers.ones, (WIDTH,))[None]

    sow = nn.Module.sow
    model = meshpar.from_linen(
        Both(), lambda apply, batch: apply(batch["x"]).mean(), jnp.ones((1, WIDTH))
    )
    assert nn.Module.sow is sow
    assert set(model.params) == {"w", "kept/mean"}
