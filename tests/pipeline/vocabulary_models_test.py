"""Models of many shapes under `vocab=pipe`: their gradients and contracts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.equality import first_step
from support.marks import slow
from support.tiny_models import lower as lower_decoder
from support.tiny_models import model, relative_error

import meshpar
from meshpar import layouts
from meshpar.errors import LayoutError
from meshpar.ops import vocabulary

ROWS, LENGTH, EMBED, VOCAB = 8, 8, 16, 64
LAYOUT = "pipe=2,microbatches=2,vocab=pipe"


def batch():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, (ROWS, LENGTH + 1), np.int32)
    kinds = rng.integers(0, VOCAB, (ROWS, LENGTH), np.int32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "kinds": kinds}


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        def param(shape, names):
            return nnx.Param(rngs.params.normal(shape) / 4, out_sharding=names)

        self.tokens = param((VOCAB, EMBED), ("vocab", "embed"))
        self.kinds = param((VOCAB, EMBED), ("vocab", "embed"))
        self.head = param((EMBED, VOCAB), ("embed", "vocab"))

        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def layers(rngs):
            named = {"out_sharding": ("embed", "mlp")}
            sizes = EMBED, EMBED
            return nnx.Linear(*sizes, use_bias=False, kernel_metadata=named, rngs=rngs)

        self.layers = layers(rngs.split(4))


def tokens(net, batch):
    return vocabulary.lookup(net.tokens[...], batch["tokens"])


def two_tables(net, batch):
    return tokens(net, batch) + vocabulary.lookup(net.kinds[...], batch["kinds"])


def one_normed(net, batch):
    x = tokens(net, batch)
    x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    return x + vocabulary.lookup(net.kinds[...], batch["kinds"])


def layer(linear, x):
    return x + jnp.tanh(linear(x))


def loss(net, x, batch):
    return vocabulary.head_losses(x, net.head[...], batch["targets"]).mean()


def again(net, x, batch):
    @jax.checkpoint
    def losses(x, w):
        return vocabulary.head_losses(x, w, batch["targets"], block=4)

    return losses(x, net.head[...]).mean()


def in_a_loop(net, x, batch):
    def halves(x):
        return x.reshape(len(x), 2, LENGTH // 2, *x.shape[2:]).swapaxes(0, 1)

    @jax.checkpoint
    def losses(_, half):
        logits = vocabulary.logits(half[0], net.head[...])
        return None, vocabulary.token_losses(logits, half[1])

    return jax.lax.scan(losses, None, (halves(x), halves(batch["targets"])))[1].mean()


def with_penalty(net, x, batch):
    size = jnp.square(x).mean()
    return loss(net, x, batch) + 0.1 * size, {"size": size}


def with_targets(net, x, batch):
    rows = vocabulary.lookup(net.tokens[...], batch["targets"])
    return loss(net, x, batch) + jnp.square(x - rows).mean()


def make(embed=tokens, layer=layer, head_loss=loss, **parts):
    stack = meshpar.LayerStack(
        stack="layers", embed=embed, layer=layer, head_loss=head_loss, **parts
    )
    return meshpar.from_nnx(Net, stack)


def lower(of, layout):
    layout = layouts.parse(layout)
    devices = jax.devices()[: layout.num_devices]
    momentum = optax.sgd(0.1, momentum=0.9)
    return meshpar.lower(of, momentum, layout, batch(), devices=devices)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        {"embed": one_normed},
        {"head_loss": with_penalty},
        {"head_loss": again},
        {"embed": two_tables},
        {"head_loss": in_a_loop},
        {"head_loss": with_targets},
    ],
    ids=lambda parts: next(iter(parts.values())).__name__,
)
@pytest.mark.parametrize("layout", [LAYOUT, slow(f"{LAYOUT},tensor=2")])
def test_models_with_a_split_vocabulary_equal_one_device_and_keep_contracts(
    layout, parts
):
    program = lower(make(**parts), layout)
    assert program.violations() == []
    _, want = first_step(lower(make(**parts), "data=1"), batch())
    _, got = first_step(program, batch())
    got = {path: x for path, x in got.items() if np.any(want[path])}
    assert relative_error(got, {path: want[path] for path in got}) < 1e-5


def test_a_head_need_not_read_all_activations():
    of = make(
        embed=lambda net, b: (tokens(net, b), tokens(net, b)),
        layer=lambda linear, x: (layer(linear, x[0]), x[1]),
        head_loss=lambda net, x, b: loss(net, x[0], b),
    )
    assert lower(of, LAYOUT).violations() == []


def test_the_loss_of_a_mixture_of_experts_is_no_function_of_logits():
    _ = lower_decoder(LAYOUT, model(num_experts=4)).lowered


def test_lookups_for_the_context_of_layers_are_refused():
    of = make(
        context=lambda net, b: tokens(net, b),
        layer=lambda linear, x, context: layer(linear, x) + context,
    )
    with pytest.raises(LayoutError, match="context of the model reads tokens"):
        lower(of, LAYOUT)
