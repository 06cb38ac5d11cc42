"""Layouts, optimizers and losses that a pipeline refuses, with the remedy."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from support import row_losses
from support.tiny_models import batch, lower, model, plain_model

import meshpar
from meshpar.errors import LayoutError
from meshpar.ops import vocabulary
from meshpar.pipeline import spec as pipeline_spec

DEEP = model(depth=8)


@pytest.mark.parametrize(
    "layout, options, words",
    [
        ("pipe=2,microbatches=4,schedule=1f1d", {}, "did you mean '1f1b'"),
        ("schedule=gpipe", {}, "gpipe with pipe=1: .*add pipe=N"),
        ("pipe=2,save=input", {}, "use auto, inputs or residuals"),
        ("pipe=2,partition=3/3", {}, "give 2 numbers of layers"),
        ("pipe=2,partition=a", {}, "as in 3/3/2"),
        (
            "pipe=4,microbatches=2,virtual_stages=2,schedule=interleaved",
            {},
            "not a multiple of pipe=4",
        ),
        ("pipe=4,params.layers=none,params.embed=pipe", {}, "name the first dim"),
        ("pipe=2,microbatches=4,params.vocab=pipe", {}, "no dim may be mapped to pipe"),
        ("pipe=2,microbatches=2,schedule=dualpipe_v", {}, "fewer than 2.pipe=4"),
        ("pipe=2,schedule=zb_v,virtual_stages=3", {}, "leave virtual_stages out"),
        ("pipe=2,microbatches=4", {"lowering": "jit"}, "the compiler makes no pipe"),
    ],
)
def test_impossible_layouts_are_refused_before_compiling(layout, options, words):
    with pytest.raises(LayoutError, match=words):
        lower(layout, DEEP, **options)
    with pytest.raises(LayoutError, match="no layered form"):
        lower("pipe=2,microbatches=4", plain_model())


def test_an_optimizer_that_mixes_layers_is_refused_if_they_are_reordered():
    with pytest.raises(LayoutError, match="mixes layers"):
        layout = "pipe=2,microbatches=4,virtual_stages=2"
        lower(layout, DEEP, optax.adafactor(1e-2, min_dim_size_to_factor=4))


def test_collectives_under_diverging_conditionals_are_refused(monkeypatch):
    """A layer that sums over tensor would wait for stages that skip it."""
    monkeypatch.setattr(pipeline_spec, "_needs_lock_step", lambda _: False)
    layout = "pipe=2,tensor=2,microbatches=2,schedule=zb_h1"
    program = lower(f"{layout},activations.residual_length=none", DEEP)
    with pytest.raises(meshpar.MeshparError, match="only some stages take .*deadlock"):
        _ = program.compiled
    with pytest.raises(meshpar.MeshparError, match="only some stages take .*deadlock"):
        program.gradients(program.init(0), batch())


def z_loss(logits):
    return jnp.square(jax.nn.logsumexp(logits, -1))


def whole_again(logits):
    """A loss that treats the slice as half of a whole vocabulary."""
    targets = jnp.zeros(logits.shape[:2], jnp.int32)
    return vocabulary.token_losses(jnp.tile(logits, 2), targets)


@pytest.mark.parametrize(
    "penalty, words",
    [
        (z_loss, "one slice of the logits"),
        (whole_again, "saw 64 tokens on every stage"),
    ],
)
def test_losses_that_treat_a_slice_of_the_vocabulary_as_whole_are_refused(
    monkeypatch, penalty, words
):
    def with_penalty(x, w, targets, block):
        logits = vocabulary.logits(x, w)
        return vocabulary.token_losses(logits, targets) + penalty(logits)

    monkeypatch.setattr(vocabulary, "head_losses", with_penalty)
    with pytest.raises(LayoutError, match=words):
        lower("pipe=2,microbatches=2,vocab=pipe", model(depth=2))


def printed(x):
    jax.debug.print("mean {}", x.mean())
    return x


def watched(x):
    jax.debug.callback(lambda mean: None, x.mean())
    return x


def computed_outside(x):
    mean = jax.lax.stop_gradient(x.mean())
    return x + jax.pure_callback(lambda x: x, jax.typeof(mean), mean)


@pytest.mark.parametrize(
    "call, name",
    [
        (printed, "jax.debug.print"),
        (watched, "jax.debug.callback"),
        (computed_outside, "jax.pure_callback"),
    ],
)
def test_python_that_a_layer_calls_is_refused_by_name(call, name):
    class Layer(row_losses.Layer):
        def __call__(self, x):
            return call(super().__call__(x))

    class Net(row_losses.Net):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.layers = nnx.List([Layer(rngs) for _ in range(4)])

    def program(layout, **options):
        net = meshpar.from_nnx(Net, row_losses.squared, layers="layers")
        devices, rows = jax.devices()[:2], row_losses.batch()
        sgd = optax.sgd(0.1)
        return meshpar.lower(net, sgd, layout, rows, devices=devices, **options)

    for layout in ("pipe=2,microbatches=2", "data=2"):
        with pytest.raises(LayoutError, match=f"calls {name} at .*:.*lowering=jit"):
            program(layout)
    assert program("data=2", lowering="jit")
