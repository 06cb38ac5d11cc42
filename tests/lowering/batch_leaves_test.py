"""Batches as others make them: 64-bit leaves, leaves of any rank and length."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.equality import first_step, start
from support.marks import slow
from support.tiny_models import host, relative_error

import meshpar

BATCH, DIM = 16, 8


class Layer(nnx.Module):
    """Self-attention over the source; the target attends to the source."""

    def __init__(self, rngs):
        def weight(names):
            return nnx.Param(rngs.params.normal((DIM, DIM)) / 3, out_sharding=names)

        self.source, self.target = weight(("embed", "mlp")), weight(("mlp", "embed"))

    def __call__(self, x):
        source_BSD, target_BTD = x
        source_BSD = source_BSD + jnp.tanh(source_BSD @ self.source[...])
        attended = jnp.einsum("BTD,BSD,BSE->BTE", target_BTD, source_BSD, source_BSD)
        return source_BSD, target_BTD + jnp.tanh(attended @ self.target[...])


class Model(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def layers(rngs):
            return Layer(rngs)

        self.layers = layers(rngs)
        self.tokens = nnx.Param(
            rngs.params.normal((16, DIM)) / 3, out_sharding=("vocab", "embed")
        )


def embed(module, batch):
    """Encoder and decoder inputs; the image is a third, of rank 4."""
    image_B1C = batch["image"].mean((1, 2))[:, None] * batch["scale"][:, None, None]
    source_BSD = module.tokens[...][batch["source"]] + image_B1C
    return source_BSD, module.tokens[...][batch["target"]]


def head_loss(module, x, batch):
    logits_BTV = x[1] @ module.tokens[...].T
    losses_BT = optax.softmax_cross_entropy_with_integer_labels(
        logits_BTV, batch["target"]
    )
    per_row_B = losses_BT.mean(1) + 0.1 * x[0].mean((1, 2)) * batch["label"]
    return per_row_B.mean(), {"labels": batch["label"].astype(jnp.float32).mean()}


MODEL = meshpar.from_nnx(
    Model, meshpar.LayerStack("layers", embed, lambda layer, x: layer(x), head_loss)
)


def rows():
    """Rows as numpy makes them: int64 and float64, five shapes."""
    rng = np.random.default_rng(0)
    return {
        "source": rng.integers(0, 16, (BATCH, 6)),
        "target": rng.integers(0, 16, (BATCH, 5)),
        "image": rng.normal(size=(BATCH, 4, 3, DIM)),
        "label": rng.integers(0, 4, BATCH),
        "scale": rng.random(BATCH),
    }


def lowered(layout, lowering=""):
    layout = meshpar.layouts.parse(layout)
    return meshpar.lower(
        MODEL,
        optax.sgd(0.1, momentum=0.9),
        layout,
        rows(),
        devices=jax.devices()[: layout.num_devices],
        lowering=lowering,
    )


def results(program):
    """Metrics, gradients and metrics of evaluation."""
    evaluated = host(program.evaluate(start(program), rows()))
    return *first_step(program, rows()), evaluated


@functools.cache
def one_device():
    return results(lowered("data=1"))


@pytest.mark.parametrize(
    "layout, lowering",
    [
        slow("data=2,fsdp=2,tensor=2", ""),
        slow("fsdp=2,microbatches=4", "jit"),
        slow("pipe=2,fsdp=2,microbatches=4", ""),
        slow("data=8", ""),
        ("fsdp=4,zero=2,microbatches=2", ""),
        slow("data=2,fsdp=2,tensor=2", "jit"),
        slow("pipe=2,data=2,tensor=2,microbatches=2,save=residuals", ""),
        slow("pipe=2,microbatches=4,tick_loop=uniform", ""),
    ],
)
def test_leaves_of_any_rank_and_length_train_as_on_one_device(layout, lowering):
    program = lowered(layout, lowering)
    for got, want in zip(results(program), one_device(), strict=True):
        assert relative_error(got, want) < 1e-5
    assert program.violations() == []


def test_64_bit_leaves_become_what_jax_makes_of_them():
    data, program = rows(), lowered("data=8")
    assert data["source"].dtype == np.int64 and data["scale"].dtype == np.float64
    placed = program.place_batch(data)
    for name, leaf in placed.items():
        want = jnp.asarray(data[name])
        assert leaf.dtype == want.dtype
        np.testing.assert_array_equal(leaf, want)
    labels = list(map(int, data["label"]))
    np.testing.assert_array_equal(
        program.place_batch(data | {"label": labels})["label"], data["label"]
    )


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**40])
def test_integers_out_of_range_are_refused(value):
    data, program = rows(), lowered("data=8")
    data["label"][3] = value
    with pytest.raises(ValueError, match=f"int64.*{value}.*int32 holds -2147483648 to"):
        program.place_batch(data)


def test_other_dtypes_and_shapes_are_refused():
    data, program = rows(), lowered("data=8")
    for name, leaf in {
        "label": data["label"].astype(np.int8),
        "scale": data["scale"].astype(np.float16),
        "target": data["target"][:, :4],
    }.items():
        with pytest.raises(ValueError, match=r"batch leaf .* was lowered for"):
            program.place_batch(data | {name: leaf})
