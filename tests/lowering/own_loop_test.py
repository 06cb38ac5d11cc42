"""A user's own loop and a program take turns; a program is a part of a user's jit.

The judge is the loop itself: the user's module, jax and optax on one device.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.marks import slow

import meshpar
from meshpar.errors import MeshparError

WIDTH = 8
X = np.random.default_rng(0).normal(size=(3, 16, WIDTH)).astype(np.float32)
BATCHES = [{"x": x, "y": np.sin(x)} for x in X]
NAMES = ("embed", "mlp")


def adam():
    return optax.adam(optax.linear_schedule(0.1, 0.01, 4))


class Layer(nnx.Module):
    def __init__(self, rngs, rate):
        names = {"out_sharding": NAMES}
        self.up = nnx.Linear(
            WIDTH, WIDTH, use_bias=False, kernel_metadata=names, rngs=rngs
        )
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(jnp.tanh(self.up(x)))


class Net(nnx.Module):
    def __init__(self, rngs, rate=0.0, depth=4):
        self.layers = nnx.List([Layer(rngs, rate) for _ in range(depth)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), NAMES)
        return x + jnp.tanh(nn.Dense(WIDTH, use_bias=False, kernel_init=init)(x))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for number in range(4):
            x = LinenLayer(name=f"layer_{number}")(x)
        return x


def loss(net, batch):
    return jnp.square(net(batch["x"]) - batch["y"]).mean()


def lowered(model, layout, optimizer=None, **options):
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    optimizer = optimizer or adam()
    return meshpar.lower(
        model, optimizer, layout, BATCHES[0], devices=devices, **options
    )


class NnxLoop:
    """A training loop of Flax NNX, as its guide has it."""

    def __init__(self, layers="layers"):
        with nnx.use_eager_sharding(False):  # Its mesh is that of one device.
            net = Net(nnx.Rngs(7))
            self.given = net, nnx.Optimizer(net, adam(), wrt=nnx.Param)
        self.model = meshpar.from_nnx(Net, loss, layers=layers)

    def step(self, batch):
        net, optimizer = self.given
        value, gradients = nnx.value_and_grad(loss)(net, batch)
        optimizer.update(net, gradients)
        return value

    def leaves(self):
        return [
            nnx.to_pure_dict(nnx.state(node, nnx.Not(nnx.RngState)))
            for node in self.given
        ]


class LinenLoop:
    """A training loop of Linen and optax, parameters in their boxes of names."""

    def __init__(self, layers="layer_*"):
        module, self.optimizer = LinenNet(), adam()
        variables = module.init(jax.random.key(7), X[0])
        self.given = variables, self.optimizer.init(variables)
        self.model = meshpar.from_linen(module, loss, X[0], layers=layers)
        self.gradients = jax.value_and_grad(
            lambda variables, batch: loss(lambda x: module.apply(variables, x), batch)
        )

    def step(self, batch):
        variables, state = self.given
        value, gradients = self.gradients(variables, batch)
        updates, state = self.optimizer.update(gradients, state)
        self.given = optax.apply_updates(variables, updates), state
        return value

    def leaves(self):
        return self.given


LAYOUTS = [
    "pipe=2,data=2,microbatches=2",
    *map(slow, ("fsdp=2,tensor=2", "data=4", "fsdp=4")),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [slow(NnxLoop), LinenLoop])
def test_training_goes_on_where_a_loop_stands(make, layout):
    loop, other = make(), make()
    program = lowered(loop.model, layout)
    for batch in BATCHES[:2]:
        loop.step(batch)
    before = jax.tree.map(np.array, loop.leaves())
    state = program.take(*loop.given)
    state, metrics = program.step(state, BATCHES[2])
    jax.tree.map(np.testing.assert_array_equal, loop.leaves(), before)
    np.testing.assert_allclose(metrics["loss"], loop.step(BATCHES[2]), rtol=1e-5)
    other.given = program.update(other.given[0], state, other.given[1])
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6),
        *(x.leaves() for x in (other, loop)),
    )
    again = program.take(*other.given, step=int(state.step))
    jax.tree.map(np.testing.assert_array_equal, again, state)


def test_a_fresh_optimizer_and_the_number_of_steps():
    loop = NnxLoop()
    program = lowered(loop.model, "data=2")
    state = program.take(loop.given[0], seed=3, step=5)
    assert (int(state.step), int(state.seed)) == (5, 3)
    fresh = program.init(3, loop.given[0])
    jax.tree.map(np.testing.assert_array_equal, state[1:], fresh[1:])
    state, _ = program.step(state, BATCHES[0])
    program.update(loop.given[0], state, loop.given[1])
    assert int(loop.given[1].step[...]) == 6
    assert int(program.take(*loop.given).step) == 6


def test_a_padded_pipeline_takes_what_it_gave():
    with nnx.use_eager_sharding(False):
        net = Net(nnx.Rngs(1), depth=3)
    model = meshpar.from_nnx(lambda rngs: Net(rngs, depth=3), loss, layers="layers")
    layout = "pipe=2,microbatches=2,partition=1/2"
    program = lowered(model, layout, optax.adam(0.1))
    state, _ = program.step(program.take(net), BATCHES[0])
    pure = optax.adam(0.1).init(nnx.to_pure_dict(nnx.state(net, nnx.Param)))
    net, pure = program.update(net, state, pure)
    again = program.take(net, pure, step=1)
    jax.tree.map(np.testing.assert_array_equal, again, state)


@pytest.mark.slow
def test_dropout_goes_on_from_seed_and_step():
    model = meshpar.from_nnx(lambda rngs: Net(rngs, 0.5), loss)
    program = lowered(model, "data=2,fsdp=2")
    state, _ = program.step(program.init(4), BATCHES[0])
    with nnx.use_eager_sharding(False):
        net = Net(nnx.Rngs(0), 0.5)
    pure = adam().init(nnx.to_pure_dict(nnx.state(net, nnx.Param)))
    net, pure = program.update(net, state, pure)
    state = program.take(net, pure, seed=4, step=1)
    value, gradients = jax.value_and_grad(  # A plain loop with the same key.
        lambda own: program.model.plain.loss(own, BATCHES[1], state.key())[0]
    )(own := jax.device_get(program.weights(state)))
    nested = jax.tree.map(jnp.asarray, nnx.to_pure_dict(nnx.state(net, nnx.Param)))
    for path, x in gradients.items():
        *above, last = (int(k) if k.isdigit() else k for k in path.split("/"))
        inner = nested
        for key in above:
            inner = inner[key]
        inner[last] = x
    updates, _ = adam().update(nested, pure)
    after, metrics = program.step(state, BATCHES[1])
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    for number in range(4):
        update = updates["layers"][number]["up"]["kernel"]
        path = f"layers/{number}/up/kernel"
        got = program.weights(after)[path]
        np.testing.assert_allclose(got, own[path] + update, rtol=1e-4, atol=1e-6)


def test_another_optimizer_state_is_refused():
    loop = LinenLoop()
    variables, state = loop.given
    program = lowered(loop.model, "data=2")
    for given, message in (
        (optax.sgd(0.1).init(variables), "state lacks 0/count"),
        ((*state, state[0]), "state has also 2/count"),
        (jax.tree.map(lambda x: x[None], state), r"0/count is given as \[1\]"),
    ):
        with pytest.raises(MeshparError, match=message):
            program.take(variables, given)
    deleted = jax.tree.map(jnp.copy, variables)
    jax.tree.map(lambda x: x.delete(), deleted)
    with pytest.raises(MeshparError, match="given to a step before"):
        program.take(deleted)


def test_replicas_take_weights_but_no_optimizer():
    loop, mode = NnxLoop(""), meshpar.LocalSGD(period=2)
    program = lowered(loop.model, "replica=2", mode=mode)
    state = program.take(loop.given[0], step=3)
    assert int(state.step) == 3
    for path, x in program.weights(state).items():
        if path.endswith("kernel"):
            number = int(path.split("/")[1])
            own = loop.given[0].layers[number].up.kernel[...]
            np.testing.assert_array_equal(x, own)
    with pytest.raises(MeshparError, match="optimizer state of its own"):
        program.take(*loop.given)
    with pytest.raises(MeshparError, match="optimizer state of its own"):
        program.update(loop.given[0], state, loop.given[1])
    for call in (program.step, program.evaluate):
        with pytest.raises(MeshparError, match="host chooses what each step runs"):
            jax.jit(call)(state, BATCHES[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [NnxLoop, slow(LinenLoop)])
def test_steps_in_a_scan_of_the_users_own(make, layout):
    loop, other = make(), make()
    program = lowered(loop.model, layout)
    start = program.take(*loop.given)
    run = jax.jit(lambda s, b: jax.lax.scan(program.step, s, b), donate_argnums=0)
    state, metrics = run(start, jax.tree.map(lambda *x: np.stack(x), *BATCHES))
    losses = [loop.step(batch) for batch in BATCHES]
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-5)
    other.given = program.update(other.given[0], state, other.given[1])
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6),
        *(x.leaves() for x in (other, loop)),
    )
    for call in (program.step, program.evaluate):
        with pytest.raises(MeshparError, match="this state was given to a step before"):
            call(start, BATCHES[0])
    with pytest.raises(MeshparError, match="this state was given to a step before"):
        program.update(loop.given[0], start)
    state, _ = program.step(state, BATCHES[0])  # Its shards are those of the program.


@pytest.mark.slow
def test_steps_and_evaluation_in_a_jit_of_the_users_own():
    model = meshpar.from_nnx(lambda rngs: Net(rngs, 0.5), loss, layers="layers")
    program = lowered(model, "data=2,fsdp=2,microbatches=2")

    def run(state, batch):
        state, _ = program.step(state, batch)
        state, metrics = program.step(state, batch)
        return state, metrics, program.evaluate(state, batch)

    got = jax.jit(run)(program.init(2), BATCHES[0])
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7),
        got,
        run(program.init(2), BATCHES[0]),
    )
    predict = program.predictor(lambda net, batch: net(batch["x"]))
    assert jax.jit(predict)(got[0].params, BATCHES[0]).shape == (16, WIDTH)


def test_what_is_no_part_of_a_users_program_says_so():
    model = NnxLoop().model
    program = lowered(model, "data=2")
    with pytest.raises(MeshparError, match=r"float32\[8, 8\] inside your jit"):
        small = jax.tree.map(lambda x: x[:8], BATCHES[0])
        jax.jit(program.step)(program.init(), small)
    program = lowered(model, "pipe=2,microbatches=2,schedule=zb_h1")
    with pytest.raises(MeshparError, match="schedule=zb_h1 has conditionals"):
        jax.jit(program.step)(program.init(), BATCHES[0])
