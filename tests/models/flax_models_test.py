"""NNX and Linen models keep one contract."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.tiny_models import model

import meshpar


def test_names_shapes_and_paths(framework):
    params = model(framework).params
    stacked = {p: v for p, v in params.items() if p.startswith("blocks/")}
    assert stacked and all(v.names[0] == "layers" for v in stacked.values())
    assert params["embedding"].names == ("vocab", "embed")
    assert params["embedding"].shape == (64, 32)


def test_init_follows_the_key_and_matches_the_contract(framework):
    tiny = model(framework)
    init = jax.jit(tiny.init)
    first, again, other = (init(jax.random.key(k)) for k in (0, 0, 1))
    assert first.keys() == tiny.params.keys()
    for path, value in first.items():
        assert value.shape == tiny.params[path].shape
        np.testing.assert_array_equal(value, again[path])
    assert (first["embedding"] != other["embedding"]).any()


class Unannotated(nnx.Module):
    """A module of Flax's own layers, without dim names."""

    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.first(x))


def test_unannotated_models_run_with_path_rules():
    unannotated = meshpar.from_nnx(
        Unannotated, lambda module, batch: jnp.mean(module(batch["x"]) ** 2)
    )
    data = {"x": np.ones((8, 4), np.float32)}
    layout = meshpar.Layout(
        fsdp=2,
        tensor=4,
        paths={"first/kernel": ("embed", "mlp"), "bias|scale": ("mlp",)},
    )
    program = meshpar.lower(unannotated, optax.adam(1e-3), layout, data)
    state, metrics = program.step(program.init(0), data)
    assert np.isfinite(float(metrics["loss"]))
    kernel = state.params["first/kernel"].sharding.spec
    assert kernel == jax.sharding.PartitionSpec("fsdp", "tensor")


def test_older_metadata_and_tuples_of_names():
    class Old(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.ones, ("embed", None))
            self.a = nnx.Param(init(rngs.params(), (4, 2)))
            self.b = nnx.Param(jnp.ones((4,)), out_sharding=(("embed", "mlp"),))

    old = meshpar.from_nnx(Old, lambda module, batch: module.b[...].sum())
    assert old.params["b"].names == (("embed", "mlp"),)


def test_no_parameters_and_bad_losses_are_errors():
    with pytest.raises(ValueError, match="no parameters"):
        meshpar.from_nnx(
            lambda rngs: nnx.Dropout(0.5, rngs=rngs), lambda module, batch: 0.0
        )
    data = {"x": np.ones((8, 4), np.float32)}
    vector = meshpar.from_nnx(Unannotated, lambda module, batch: module(batch["x"]))
    with pytest.raises(ValueError, match=r"loss of shape \(8, 8\)"):
        meshpar.lower(vector, optax.sgd(1), "data=8", data)
    aux = meshpar.from_nnx(
        Unannotated, lambda m, batch: (m(batch["x"]).mean(), {"y": m(batch["x"])})
    )
    with pytest.raises(ValueError, match=r"aux\['y'\] has a dim for the rows"):
        meshpar.lower(aux, optax.sgd(1), "data=8", data, lowering="shard_map")


def test_aux_cannot_hide_the_metrics():
    hidden = meshpar.from_nnx(
        Unannotated, lambda module, batch: (module(batch["x"]).mean(), {"loss": 0.0})
    )
    data = {"x": np.ones((8, 4), np.float32)}
    with pytest.raises(ValueError, match="'loss'. has the name of a metric"):
        meshpar.lower(hidden, optax.sgd(1), "data=8", data)


def test_linen_keyword_inputs_and_random_streams():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x, scale, train=False):
            w = self.param("w", nn.initializers.ones, (4,))
            noise = jax.random.normal(self.make_rng("noise"), ()) if train else 0.0
            return (x * w[None]).sum() * scale + noise

    inputs = {"x": jax.ShapeDtypeStruct((2, 4), jnp.float32), "scale": 2.0}
    noisy = meshpar.from_linen(
        Noisy(),
        lambda apply, batch: apply(batch["x"], scale=2.0, train=True),
        inputs,
        lambda apply, batch: apply(batch["x"], scale=2.0),
        rngs=("noise",),
    )
    params = noisy.init(jax.random.key(0))
    data = {"x": jnp.ones((2, 4))}
    losses = [float(noisy.loss(params, data, jax.random.key(k))[0]) for k in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    assert float(noisy.evaluation_loss(params, data)[0]) == 16.0


def test_linen_logical_constraints_follow_the_layout():
    """Linen models may name activations with Flax's own function."""

    class Public(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp"))
            h = x @ self.param("w", init, (8, 16))
            return nn.with_logical_constraint(h, ("batch", "mlp")).mean()

    data = {"x": np.ones((8, 8), np.float32)}
    public = meshpar.from_linen(
        Public(), lambda apply, batch: apply(batch["x"]), jnp.ones((8, 8))
    )
    program = meshpar.lower(public, optax.sgd(1.0), "data=2,fsdp=2,tensor=2", data)
    state, metrics = program.step(program.init(0), data)
    assert float(metrics["loss"]) == 8.0
    assert "sharding_constraint" in program.lowered.as_text()
