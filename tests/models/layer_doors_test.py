"""Layers are found wherever public models keep them: a plain loop judges."""

import concurrent.futures
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen import partitioning
from support import equality
from support.marks import slow
from support.shapes import trace_loss

import meshpar

WIDTH, DEPTH = 8, 4
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
BATCH = {"x": X, "y": np.sin(X)}
BATCHES = [BATCH, {name: x[::-1] for name, x in BATCH.items()}]
NAMES = "first", "second", "third", "fourth"


class Layer(nnx.Module):
    def __init__(self, rngs, index=0, reads_index=False):
        self.index, self.name, self.reads_index = index, f"layer_{index}", reads_index
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, mask=1.0):
        y = jnp.tanh(self.up(x)) * mask
        return x + (y * self.index if self.reads_index else y)


class Listed(nnx.Module):
    def __init__(self, rngs, **options):
        layers = (Layer(rngs, index, **options) for index in range(DEPTH))
        self.layers = nnx.List(layers)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Named(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.Dict({name: Layer(rngs) for name in NAMES})

    def __call__(self, x):
        for name in NAMES:
            x = self.blocks[name](x)
        return x


class Attributes(nnx.Module):
    """Its attributes are not in the order of their names."""

    def __init__(self, rngs):
        for index in range(12):
            setattr(self, f"layer_{index}", Layer(rngs))

    def __call__(self, x):
        for index in range(12):
            x = getattr(self, f"layer_{index}")(x)
        return x


class Transformed(Listed):
    """Layers in jit and in checkpoint, as public code writes them."""

    def __call__(self, x):
        jitted = nnx.jit(lambda layer, x: layer(x))
        saved = nnx.remat(lambda layer, x: layer(x))
        for number, layer in enumerate(self.layers):
            x = jitted(layer, x) if number < 2 else saved(layer, x)
        return x


class Masked(Listed):
    """Every other layer has another mask, made where it is used."""

    def __call__(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x, mask=jnp.arange(WIDTH)[None] * 0.1 + number % 2)
        return x


class Cached(nnx.Module):
    """As decoders for inference are written: caches in and out, unused in training."""

    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.end = nnx.Cache(jnp.zeros((), jnp.int32))

    def __call__(self, x, cache, positions):
        return x + jnp.tanh(self.up(x)), (cache, positions)


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Cached(rngs) for _ in range(DEPTH)])

    def __call__(self, x):
        caches = [None] * DEPTH
        for number, layer in enumerate(self.layers):
            x, caches[number] = layer(x, caches[number], jnp.arange(x.shape[1]))
        return x


def masked(rngs):
    net = Masked(rngs)
    for number, layer in enumerate(net.layers):
        layer.kind = number % 2
    return net


NNX = {
    "index": (Listed, "layers"),
    "dict": (Named, "blocks"),
    "attributes": (Attributes, "layer_*"),
    "transformed": (Transformed, "layers"),
    "masks": (masked, "layers"),
    "caches": (Decoder, "layers"),
}


class Block(nn.Module):
    index: int = 0
    pairs: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        x = x + jnp.tanh(nn.Dense(WIDTH)(x))
        return (x, None) if self.pairs else x


class Loop(nn.Module):
    lift: str = ""

    @nn.compact
    def __call__(self, x):
        block = {"": Block, "remat": nn.remat(Block), "jit": nn.jit(Block)}[self.lift]
        for index in range(DEPTH):
            own = 0 if self.lift == "jit" else index
            x = block(own, name=f"block_{index}")(x)
        return x


class ScanWithAxes(nn.Module):
    @nn.compact
    def __call__(self, x):
        stack = partitioning.scan_with_axes(
            nn.remat(Block),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=DEPTH,
            axis_name="layers",
        )
        return stack(pairs=True, name="stack")(x, None)[0]


LINEN = {
    "fields": (Loop(), "block_*"),
    "remat": (Loop("remat"), "block_*"),
    "scan_with_axes": (ScanWithAxes(), "stack"),
}


def nnx_loss(net, batch):
    return jnp.square(net(batch["x"]) - batch["y"]).mean()


def linen_model(name):
    module, layers = LINEN[name]
    return meshpar.from_linen(module, nnx_loss, X[:1], layers=layers)


def model_of(name):
    if name in LINEN:
        return linen_model(name)
    make, layers = NNX[name]
    return meshpar.from_nnx(make, nnx_loss, layers=layers)


DOORS = ("index", "dict", "attributes", "scan_with_axes")
"""Ways of keeping layers that run by default; -m slow has the others."""


@pytest.mark.parametrize("layout", ["data=2", slow("pipe=2,microbatches=2")])
@pytest.mark.parametrize(
    "name", [name if name in DOORS else slow(name) for name in (*NNX, *LINEN)]
)
def test_layers_train_wherever_they_are_kept(name, layout):
    optimizer, devices = optax.sgd(0.1, momentum=0.9), jax.devices()[:2]
    program = meshpar.lower(model_of(name), optimizer, layout, BATCH, devices=devices)
    report = equality.compare(program, None, BATCHES)
    assert report.ok, report


@pytest.mark.parametrize("name, stays", [("fields", False), ("remat", True)])
def test_the_remat_of_a_linen_layer_stays(name, stays):
    model = linen_model(name)

    def loss(key):
        return model.loss(model.init(key), BATCH, key).loss

    assert ("remat" in str(jax.make_jaxpr(loss)(jax.random.key(0)))) == stays


def test_a_layer_that_reads_what_tells_it_apart_is_refused():
    def make(rngs):
        return Listed(rngs, reads_index=True)

    model = meshpar.from_nnx(make, nnx_loss, layers="layers")
    with pytest.raises(ValueError, match=r"layer 1 computes .*index=1 \(there 0\)"):
        trace_loss(model, BATCH)


def test_layers_of_which_flax_traces_one_are_refused():
    with pytest.raises(ValueError, match="of 4 layers and 1 of them .* nn.jit away"):
        meshpar.from_linen(Loop("jit"), nnx_loss, X[:1], layers="block_*")


@pytest.mark.slow
def test_threads_trace_models_at_the_same_time():
    """Nothing of Flax is changed while a model is traced."""

    def traced(number):
        model = linen_model(list(LINEN)[number % len(LINEN)])
        params = model.init(jax.random.key(0))
        return float(model.loss(params, BATCH, jax.random.key(1)).loss)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(traced, range(12)))
    assert found == [traced(number) for number in range(3)] * 4


class OwnFunctions(nnx.Module):
    """A layer with functions that it makes for itself, as models with options do."""

    def __init__(self, rngs, power=2):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.init = nnx.initializers.normal(0.02)
        self.act = functools.partial(nnx.gelu, approximate=power > 1)
        self.scale = lambda x: x / power

    def __call__(self, x):
        return x + self.scale(self.act(self.up(x)))


def of_own_functions(powers):
    class Net(Listed):
        def __init__(self, rngs):
            self.layers = nnx.List([OwnFunctions(rngs, power) for power in powers])

    return meshpar.from_nnx(Net, nnx_loss, layers="layers")


def test_functions_that_layers_make_for_themselves_are_equal_if_they_compute_so():
    alike, pattern = of_own_functions([2, 2, 2, 2]), of_own_functions([2, 3, 2, 3])
    assert alike.traits.pattern == 1 and pattern.traits.pattern == 2
    with pytest.raises(ValueError, match="its 3 layers are not equal"):
        of_own_functions([2, 3, 4])
    sgd, devices = optax.sgd(0.1, momentum=0.9), jax.devices()[:2]
    layout = "pipe=2,microbatches=2"
    program = meshpar.lower(pattern, sgd, layout, BATCH, devices=devices)
    report = equality.compare(program, None, BATCHES)
    assert report.ok, report
