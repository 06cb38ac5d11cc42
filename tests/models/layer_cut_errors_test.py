"""NNX layers that cannot run one by one are refused with the reason."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.shapes import trace_loss

import meshpar

ROWS, EMBED = 4, 8
BATCH = {"x": np.ones((ROWS, EMBED), np.float32), "ids": np.arange(ROWS)}


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
    return x[0] if isinstance(x, tuple) else x


def repeated(net, x):
    """One layer in two rounds, which are not two layers."""
    return jax.lax.scan(lambda x, _: (net.layers[0](x), None), x, None, 2)[0]


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


def differentiated(net, x):
    return jax.grad(lambda x: in_turn(net, x).sum())(x)


def scanned(net, x):
    first, second = net.layers
    return jax.lax.scan(lambda x, _: (second(first(x)), None), x, None, 2)[0]


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
    "differentiated": (differentiated, "layer 0 of 'layers' inside a transformation"),
    "scanned": (scanned, "layer 0 of 'layers' inside a transformation"),
    "repeated": (repeated, "layer 0 of 'layers' inside a transformation"),
    "parallel": (
        lambda net, x: net.layers[0](x) + net.layers[1](x),
        "layer 1 is called with nothing that layer 0 returned",
    ),
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
        trace_loss(from_nnx(forward), BATCH)


class Wider(Layer):
    def __call__(self, x):
        return jnp.concatenate([x, x], axis=1)


class Pair(Layer):
    """Takes one array and returns two."""

    def __call__(self, x):
        first = x[0] if isinstance(x, tuple) else x
        return first, first


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
        (Pair, "takes 1 arrays of activations and layer 1 of 'layers' 2 arrays"),
        (Counting, "changes its variable 'count'"),
        (Sowing, "sows 'mean' where it runs layer by layer"),
    ],
)
def test_layers_that_do_more_than_turn_activations_into_activations(kind, words):
    with pytest.raises(ValueError, match=words):
        trace_loss(from_nnx(in_turn, kind), BATCH)


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
    "other name": (Net, Layer, "block_*", r"modules are 'layers/\*'$"),
    "no pattern": (sizes(8, 8, 4), Layer, "layers", "layer 2 differs from layer 0"),
    "no parameters": (Net, Empty, "layers", "the layers have no parameters"),
}


@pytest.mark.parametrize(
    "make, kind, layers, words", NNX_LAYERS.values(), ids=NNX_LAYERS
)
def test_nnx_layers_that_cannot_be_stacked_are_refused(make, kind, layers, words):
    with pytest.raises(ValueError, match=words):
        from_nnx(in_turn, kind, make, layers)


@pytest.mark.parametrize("layers", ["layers.*", "layers/*"])
def test_nnx_layers_may_be_named_as_paths_of_parameters(layers):
    assert from_nnx(in_turn, layers=layers).params == from_nnx(in_turn).params


def test_layers_are_described_once():
    stack = meshpar.LayerStack("layers", None, None, None)
    with pytest.raises(ValueError, match="not both"):
        meshpar.from_nnx(Net, stack, layers="layers")
