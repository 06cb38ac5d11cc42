"""Linen layers that cannot run one by one are refused with the reason."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.shapes import trace_loss

import meshpar

ROWS, EMBED = 4, 8
BATCH = {"x": np.ones((ROWS, EMBED), np.float32)}


class LinenLayer(nn.Module):
    pairs: bool = False
    shared: nn.Module | None = None
    state: str = ""

    @nn.compact
    def __call__(self, x, *_):
        x = nn.Dense(EMBED)(x)
        if self.shared is not None:
            x = self.shared(x)
        if self.state == "seen":
            self.variable("seen", "mean", jnp.mean, x)
        if self.state == "sown":
            self.sow("intermediates", "mean", jnp.mean(x))
        return (x, None) if self.pairs else x


class LinenNet(nn.Module):
    names: tuple[str, ...] = ("layer_0", "layer_1")
    share: bool = False
    state: str = ""
    beside: str = "beside"

    @nn.compact
    def __call__(self, x):
        other = nn.Dense(EMBED, name=self.beside)
        x = other(x)
        for name in self.names:
            shared = other if self.share else None
            x = LinenLayer(False, shared, self.state, name=name)(x)
        return x


def scanned(inputs=None, length=2, **settings):
    settings = {"variable_axes": {"params": 0}, "in_axes": nn.broadcast} | settings
    settings = {"split_rngs": {"params": True, "dropout": True}} | settings

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            stack = nn.scan(LinenLayer, length=length, **settings)
            return stack(pairs=True, name="stack")(x, inputs)[0]

    return Scanned()


def from_linen(module, layers, **options):
    def loss(apply, batch):
        result = apply(batch["x"], **options)
        return jnp.mean((result[0] if options else result) ** 2)

    return meshpar.from_linen(module, loss, BATCH["x"], layers=layers)


LINEN_LAYERS = {
    "stars": (LinenNet(), "*_*", "one . in place of their number"),
    "no layer": (LinenNet(), "block_*", r"no layer .* modules are 'layer_\*'$"),
    "no stack": (LinenNet(), "block", "'block' is no module that the model calls"),
    "numbers": (LinenNet(("layer_1", "layer_2")), "layer_*", r"calls layers \[1, 2\]"),
    "state": (LinenNet(state="seen"), "layer_*", "keeps seen/layer_0/mean"),
    "shared": (LinenNet(share=True), "layer_*", "layer 0 shares the module 'beside'"),
    "path": (
        LinenNet(beside="layer"),
        "layer_*",
        "gets the path 'layer', but the model has 'layer/bias'; rename it",
    ),
    "no scan": (LinenNet(), "beside", "'beside' is a Dense and no module of nn.scan"),
    "axes": (scanned(variable_axes={"params": 1}), "stack", "params': 1}; meshpar nee"),
    "reverse": (scanned(reverse=True), "stack", "nn.scan has reverse=True"),
    "same noise": (
        scanned(split_rngs={"params": True, "dropout": False}),
        "stack",
        "all layers draw the same numbers from 'dropout'; split it",
    ),
}


@pytest.mark.parametrize(
    "module, layers, words", LINEN_LAYERS.values(), ids=LINEN_LAYERS
)
def test_linen_layers_that_cannot_be_stacked_are_refused(module, layers, words):
    with pytest.raises(ValueError, match=words):
        from_linen(module, layers)


def test_linen_calls_that_layers_alone_could_answer_are_refused():
    sown = from_linen(LinenNet(state="sown"), "layer_*")
    trace_loss(sown, BATCH)  # Nobody asks for it.
    asked = from_linen(LinenNet(state="sown"), "layer_*", mutable=["intermediates"])
    with pytest.raises(ValueError, match="asks for mutable='intermediates'"):
        trace_loss(asked, BATCH)
    own = from_linen(scanned(jnp.ones((2, 3)), in_axes=0), "stack")
    with pytest.raises(ValueError, match="each layer inputs of its own .in_axes"):
        trace_loss(own, BATCH)


def test_linen_refuses_slices_of_the_vocabulary():
    """Linen modules check the shapes of their parameters themselves."""

    class Embedded(nn.Module):
        @nn.compact
        def __call__(self, ids):
            init = nn.with_partitioning(nn.initializers.ones, ("vocab", None))
            table = self.param("table", init, (16, EMBED))
            x = meshpar.ops.vocabulary.lookup(table, ids)
            for number in range(2):
                x = nn.Dense(EMBED, name=f"layer_{number}")(x)
            return jnp.einsum("BLD,VD->BLV", x, table)

    def loss(apply, batch):
        losses = meshpar.ops.vocabulary.token_losses(apply(batch["ids"]), batch["ids"])
        return losses.mean()

    ids = np.arange(ROWS)[:, None]
    model = meshpar.from_linen(Embedded(), loss, ids, layers="layer_*")
    with pytest.raises(meshpar.LayoutError, match=r"table is \[8, 8\] .* vocab=pipe"):
        layout = "pipe=2,microbatches=2,vocab=pipe"
        devices = jax.devices()[:2]
        program = meshpar.lower(
            model, optax.sgd(1), layout, {"ids": ids}, devices=devices
        )
        _ = program.lowered
