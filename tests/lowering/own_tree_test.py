"""Optimizers see the model's own tensors: a plain loop of optax is the judge."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import path_aware_map
from optax import contrib
from support.marks import slow

import meshpar
from meshpar import layouts
from meshpar.errors import LayoutError
from meshpar.islands import BSP, Islands
from meshpar.lowering.layer_update import MODEL, ROWS, STACKS

DEPTH, WIDTH = 4, 8


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.up(self.norm(x)))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(DEPTH)])
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(net, batch):
    return jnp.square(net(batch["x"]) - batch["y"]).mean()


def by_layer(params):
    """The number of the layer in each path, or "head"."""

    def number(path, _):
        found = re.search(r"layers/(\d+)", "/".join(map(str, path)))
        return found.group(1) if found else "head"

    return path_aware_map(number, params)


def frozen(params):
    return jax.tree.map(lambda n: "no" if n in ("0", "1") else "yes", by_layer(params))


def matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


RATES = {str(i): optax.sgd(0.1 * 0.5**i) for i in range(DEPTH)}
OPTIMIZERS = {
    "adam": (STACKS, optax.adam(1e-2)),
    "clip": (
        STACKS,
        optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)),
    ),
    "MultiSteps": (STACKS, optax.MultiSteps(optax.adam(1e-2), 2)),
    "decay of matrices": (ROWS, optax.adamw(1e-2, weight_decay=1.0, mask=matrices)),
    "muon": (ROWS, contrib.muon(1e-2)),
    "lamb": (ROWS, optax.lamb(1e-2)),
    "adafactor": (ROWS, optax.adafactor(1e-2, min_dim_size_to_factor=4)),
    "sm3": (ROWS, optax.sm3(0.1)),
    "MultiSteps of muon": (ROWS, optax.MultiSteps(contrib.muon(1e-2), 2)),
    "first layers frozen": (
        MODEL,
        optax.multi_transform(
            {"yes": optax.sgd(0.1), "no": optax.set_to_zero()}, frozen
        ),
    ),
    "rates by layer": (
        MODEL,
        optax.multi_transform({"head": optax.adam(0.1), **RATES}, by_layer),
    ),
    "noise": (MODEL, optax.noisy_sgd(0.1, key=0)),
    "sharpness-aware": (
        None,
        contrib.sam(optax.sgd(0.1), contrib.normalize(), sync_period=2),
    ),
}


def batch(seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(16, WIDTH)), rng.normal(size=(16, 4))
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def trained_plainly(optimizer, batches, start=None):
    """The parameters after some steps of a user's own loop, and the optimizer state."""
    graph, params = nnx.split(Net(nnx.Rngs(0)))
    params = nnx.to_pure_dict(params)

    @jax.jit
    def step(params, state, data):
        grads = jax.grad(lambda p: loss(nnx.merge(graph, p), data))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = start or (params, optimizer.init(params))
    for data in batches:
        params, state = step(params, state, data)
    return params, state


def by_path(params):
    flat = nnx.traversals.flatten_mapping(params)
    return {"/".join(map(str, keys)): np.asarray(x) for keys, x in flat.items()}


def check_weights(program, state, params):
    """Checks that a program has these weights, in the module's tree."""
    found = program.weights(state)
    for path, expected in by_path(params).items():
        error = np.abs(jax.device_get(found[path]) - expected).max()
        assert error < 1e-5 * max(np.abs(expected).max(), 1e-2), path


def lowered(optimizer, layout, **options):
    layout = layouts.parse(layout)
    model = meshpar.from_nnx(Net, loss, layers="layers")
    devices = jax.devices()[: layout.num_devices]
    return meshpar.lower(model, optimizer, layout, batch(), devices=devices, **options)


PADDED = "pipe=3,data=2,microbatches=2"
REORDERED = "pipe=2,data=2,schedule=interleaved,virtual_stages=2,microbatches=4"


DEFAULT = {"decay of matrices", "rates by layer", "sharpness-aware"}
"""Optimizers of every way of an update but Adam's; `-m slow` runs all others."""


@pytest.mark.parametrize(
    "layout", ["data=8", slow(PADDED), slow(REORDERED), slow("data=1")]
)
@pytest.mark.parametrize("name", [n if n in DEFAULT else slow(n) for n in OPTIMIZERS])
def test_trains_the_weights_of_a_plain_loop(name, layout):
    how, optimizer = OPTIMIZERS[name]
    program = lowered(optimizer, layout)
    if how is not None and layout != PADDED:
        assert program.lowering.optimizer.layers == how
    state = program.init(params=Net(nnx.Rngs(0)))
    batches = [batch(step) for step in range(3)]
    for data in batches:
        state, _ = program.step(state, data)
    check_weights(program, state, trained_plainly(optimizer, batches)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", [slow("muon"), slow("lamb"), "first layers frozen"])
def test_replicas_that_train_apart_do_so_as_plain_loops(name):
    """Local SGD: two replicas average their weights after every second step."""
    _, optimizer = OPTIMIZERS[name]
    program = lowered(optimizer, "replica=2", mode=meshpar.LocalSGD(period=2))
    state = program.init(params=Net(nnx.Rngs(0)))
    own = [None, None]
    for pair in ([batch(0), batch(1)], [batch(2), batch(3)]):
        for data in pair:
            state, _ = program.step(state, data)
        for i in range(2):
            halves = [{k: np.split(x, 2)[i] for k, x in data.items()} for data in pair]
            own[i] = trained_plainly(optimizer, halves, own[i])
        mean = jax.tree.map(lambda a, b: (a + b) / 2, own[0][0], own[1][0])
        own = [(mean, inner) for _, inner in own]
    check_weights(program, state, mean)


@pytest.mark.parametrize("name", [slow("muon"), slow("lamb"), "first layers frozen"])
def test_islands_train_as_plain_loops(name):
    """DiLoCo: the store's weights go half of the way that islands went in two steps."""
    _, optimizer = OPTIMIZERS[name]
    half = batch()
    whole = {key: np.concatenate([x, x]) for key, x in half.items()}
    mode = Islands(2, "diloco", BSP(), push=2, learning_rate=0.5, momentum=0.0)
    model = meshpar.from_nnx(Net, loss, layers="layers")
    devices = jax.devices()[:4]
    program = meshpar.lower(
        model, optimizer, "data=2", whole, devices=devices, mode=mode
    )
    state = program.init(params=Net(nnx.Rngs(0)))
    center, inner = trained_plainly(optimizer, [])
    for _ in range(2):
        for _ in range(2):
            state, _ = program.step(state, whole)
        own, inner = trained_plainly(optimizer, [half] * 2, (center, inner))
        center = jax.tree.map(lambda c, o: c - 0.5 * (c - o), center, own)
    check_weights(program, program.in_model_order(state), center)
    program.close()


def test_layers_with_states_of_their_own_keep_their_shardings():
    """One layer's momentum is split as its stack is, and no stage pads it."""
    momentum = optax.multi_transform(
        {"yes": optax.sgd(0.1, momentum=0.9), "no": optax.set_to_zero()}, frozen
    )
    program = lowered(momentum, "data=8")
    paths = [leaf.path for leaf in program.plan.optimizer]
    assert any("layers/up/kernel@layers/2/up/kernel" in path for path in paths)
    assert not any("layers/0/" in path for path in paths)


@pytest.mark.parametrize(
    "layout", ["data=2,offload=optimizer", "pipe=4,schedule=pipedream"]
)
def test_layers_that_differ_are_refused_where_each_is_updated_alone(layout):
    layout += ",microbatches=4" if "pipe" in layout else ""
    with pytest.raises(LayoutError, match="treats layers differently"):
        lowered(OPTIMIZERS["rates by layer"][1], layout)
