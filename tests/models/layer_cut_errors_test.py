"""Layers that cannot run one by one are refused with the reason, in NNX and Linen."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar

ROWS, EMBED = 4, 8
BATCH = {"x": np.ones((ROWS, EMBED), np.float32), "ids": np.arange(ROWS)}


def trace(model):
    """Traces the loss on shapes."""
    params = {
        p: jax.ShapeDtypeStruct(x.shape, x.dtype) for p, x in model.params.items()
    }
    jax.eval_shape(lambda p: model.loss(p, BATCH, jax.random.key(0)).loss, params)


# NNX: a loss function calls the layers of a list in some way.


class Layer(nnx.Module):
    def __init__(self, rngs, size=EMBED):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (size, EMBED)))
        self.noise = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, *_):
        return jnp.tanh(x @ self.w[...])


class Net(nnx.Module):
    def __init__(self, rngs, kind=Layer, depth=2):
        self.layers = nnx.List([kind(rngs) for _ in range(depth)])
        self.scale = nnx.Param(jnp.ones(()))


def from_nnx(forward, kind=Layer, make=Net, layers="layers"):
    def loss(net, batch):
        return jnp.mean(forward(net, batch["x"] * net.scale[...]) ** 2)

    return meshpar.from_nnx(lambda rngs: make(rngs, kind), loss, layers=layers)


def in_turn(net, x):
    for layer in net.layers:
        x = layer(x)
    return x


def with_each(argument):
    def forward(net, x):
        for number, layer in enumerate(net.layers):
            x = layer(x, argument(net, number))
        return x

    return forward


def backwards(net, x):
    return net.layers[0](net.layers[1](x))


def scaled_between(net, x):
    return net.layers[1](2 * net.layers[0](x))


def vmapped(net, x):
    return jax.vmap(lambda row: in_turn(net, row))(x)


def changed(net, x):
    x = net.layers[0](x)
    net.layers[1].noise.rate = 0.25
    return net.layers[1](x)


def keyed(net, _):
    return jax.random.key(0)


CALLS = {
    "no layer": (lambda net, x: x, "calls 0 of 2 layers.*__call__"),
    "one layer": (lambda net, x: net.layers[0](x), "calls 1 of 2 layers"),
    "order": (backwards, "calls layer 1 when layer 0 is due"),
    "twice": (lambda net, x: net.layers[0](in_turn(net, x)), "layer 0 when layer 2"),
    "between": (scaled_between, "computes between layers 0 and 1; move that into"),
    "transformed": (vmapped, "layer 0 of 'layers' inside a transformation of jax"),
    "array": (
        with_each(lambda net, i: jnp.ones(()) * i),
        "layer 1 is called with othe",
    ),
    "flag": (with_each(lambda net, i: i), "layer 1 is called with other arguments"),
    "attribute": (changed, "gives layer 1 other attributes than layer 0"),
    "key": (with_each(keyed), "layer 0 of 'layers' is called with a random key"),
    "integers": (
        lambda net, x: in_turn(net, jnp.arange(3)),
        r"called with int32\[3\] as its first positional argument",
    ),
    "nothing": (lambda net, x: net.layers[0](None), "called with nothing as its first"),
}


@pytest.mark.parametrize("forward, words", CALLS.values(), ids=CALLS)
def test_calls_that_are_not_one_after_the_other_are_refused(forward, words):
    with pytest.raises(ValueError, match=words):
        trace(from_nnx(forward))


class Wider(Layer):
    def __call__(self, x):
        return jnp.concatenate([x, x], axis=1)


class WithLoss(Layer):
    def __call__(self, x):
        return x, jnp.mean(x)


class Counting(Layer):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.count = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.count[...] += 1
        return x


class Sowing(Layer):
    def __call__(self, x):
        self.mean = nnx.Intermediate(jnp.mean(x))
        return x


@pytest.mark.parametrize(
    "kind, words",
    [
        (Wider, r"turns float32\[4, 8\] into float32\[4, 16\]"),
        (WithLoss, "takes 1 arrays of activations and returns 2 arrays"),
        (Counting, "changes its variable 'count'"),
        (Sowing, "makes the variable 'mean' while it runs .sow.*leave layers out"),
    ],
)
def test_layers_that_do_more_than_turn_activations_into_activations(kind, words):
    with pytest.raises(ValueError, match=words):
        trace(from_nnx(in_turn, kind))


class SharedLayer(Layer):
    def __init__(self, rngs, table):
        super().__init__(rngs)
        self.table = table


class Sharing(Net):
    def __init__(self, rngs, _):
        self.bias = nnx.Param(jnp.ones((EMBED,)))
        self.layers = nnx.List([SharedLayer(rngs, self.bias) for _ in range(2)])
        self.scale = nnx.Param(jnp.ones(()))


def sizes(*sizes):
    class Sized(Net):
        def __init__(self, rngs, _):
            self.layers = nnx.List([Layer(rngs, size) for size in sizes])
            self.scale = nnx.Param(jnp.ones(()))

    return Sized


class Empty(nnx.Module):
    def __init__(self, rngs):
        del rngs


NNX_LAYERS = {
    "attribute": (Net, Layer, "blocks", "Net has no attribute 'blocks'.* layers"),
    "no list": (Net, Layer, "scale", "'scale' is a Param; name an nnx.List"),
    "shared": (Sharing, Layer, "layers", "layer 0 shares its variable 'table'"),
    "no layer": (sizes(), Layer, "layers", "matches no layer"),
    "no pattern": (sizes(8, 8, 4), Layer, "layers", "layer 2 differs from layer 0"),
    "no parameters": (Net, Empty, "layers", "the layers have no parameters"),
}


@pytest.mark.parametrize(
    "make, kind, layers, words", NNX_LAYERS.values(), ids=NNX_LAYERS
)
def test_nnx_layers_that_cannot_be_stacked_are_refused(make, kind, layers, words):
    with pytest.raises(ValueError, match=words):
        from_nnx(in_turn, kind, make, layers)


def test_layers_are_described_once():
    stack = meshpar.LayerStack("layers", None, None, None)
    with pytest.raises(ValueError, match="not both"):
        meshpar.from_nnx(Net, stack, layers="layers")


# Linen.


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
    "no layer": (LinenNet(), "block_*", "matches no layer"),
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
    trace(sown)  # Nobody asks for it.
    asked = from_linen(LinenNet(state="sown"), "layer_*", mutable=["intermediates"])
    with pytest.raises(ValueError, match="asks for mutable='intermediates'"):
        trace(asked)
    own = from_linen(scanned(jnp.ones((2, 3)), in_axes=0), "stack")
    with pytest.raises(ValueError, match="in_axes=0, so that each layer gets inputs"):
        trace(own)


def test_linen_refuses_slices_of_the_vocabulary():
    """Linen modules check the shapes of their parameters themselves."""

    class Embedded(nn.Module):
        @nn.compact
        def __call__(self, ids):
            init = nn.with_partitioning(nn.initializers.ones, ("vocab", None))
            table = self.param("table", init, (16, EMBED))
            x = meshpar.vocabulary.lookup(table, ids)
            for number in range(2):
                x = nn.Dense(EMBED, name=f"layer_{number}")(x)
            return jnp.einsum("BLD,VD->BLV", x, table)

    def loss(apply, batch):
        losses = meshpar.vocabulary.token_losses(apply(batch["ids"]), batch["ids"])
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
