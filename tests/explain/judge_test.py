"""The judge is a plain loop: it shares no form of the model with the lowerings."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import tiny_models, tiny_stack
from support.marks import slow

import meshpar
from meshpar.errors import MeshparError
from meshpar.explain.judge import reason_no_judge
from meshpar.explain.verify import judged, verify

WIDTH = 8
ADAM = optax.adam(1e-2)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.up(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(4)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + jnp.tanh(nn.Dense(WIDTH)(x))


class LinenNet(nn.Module):
    train: bool = True

    @nn.compact
    def __call__(self, x):
        for i in range(4):
            x = Block(name=f"block_{i}")(x)
        return nn.BatchNorm(use_running_average=not self.train)(x)


def loss(net, batch):
    return jnp.square(net(batch["x"]) - batch["y"]).mean()


def batch(seed=0):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(16, WIDTH)).astype(np.float32) for k in "xy"}


BATCHES = [batch(i) for i in range(3)]


def lower(model, layout="data=8", optimizer=ADAM, **options):
    return meshpar.lower(model, optimizer, layout, batch(), **options)


def layered():
    return meshpar.from_nnx(Net, loss, layers="layers")


def linen(**options):
    options["evaluation_module"] = LinenNet(train=False)
    return meshpar.from_linen(LinenNet(), loss, batch()["x"][:1], **options)


@pytest.mark.parametrize(
    "program",
    [
        lambda: lower(layered(), "data=2,pipe=4,microbatches=2", clip_norm=0.1),
        slow(lambda: lower(linen(), "data=8")),
        slow(lambda: lower(linen(trained="block_[23]"), "data=8", optax.lamb(1e-2))),
        slow(lambda: tiny_models.lower("fsdp=2,tensor=2")),
    ],
    ids=["pipeline", "batch statistics", "partly frozen", "stacked by the user"],
)
def test_programs_equal_a_plain_loop(program):
    program = program()
    tiny = "tokens" in program.abstract_batch
    batches = [tiny_models.batch(i) for i in range(2)] if tiny else BATCHES
    report = verify(program, None, batches)
    assert report.ok, report
    assert str(report).startswith("EQUAL to a plain loop")
    kinds = {c.kind for c in report.comparisons}
    assert {"weight", "gradient", "optimizer", "evaluation", "loss"} <= kinds


def test_a_gradient_that_layers_share_wrongly_is_found_and_named():
    """Every layered program has it: the comparison of two of them finds nothing."""
    model = layered()

    def doubled(params, *rest):
        x = params["layers/up/kernel"]
        row = x[2] * 2 - jax.lax.stop_gradient(x[2])
        return model.loss({**params, "layers/up/kernel": x.at[2].set(row)}, *rest)

    wrong = dataclasses.replace(model, loss=doubled, layered=None)
    report = verify(lower(wrong), None, BATCHES[:1])
    first = report.first_difference
    assert (first.kind, first.tensor, first.step) == (
        "gradient",
        "layers/2/up/kernel",
        1,
    )
    found, wanted = first.values
    assert found == pytest.approx(2 * wanted, rel=1e-3)
    assert f"{found:.6g}" in str(report) and "DIFFERENT" in str(report)
    assert verify(
        lower(wrong), lower(wrong, "data=1", devices=jax.devices()[:1]), [BATCHES[0]]
    ).ok


def test_weights_at_the_start_are_compared():
    model = layered()

    def scaled(key):
        return {path: 1.01 * x for path, x in model.init(key).items()}

    report = verify(lower(dataclasses.replace(model, init=scaled)), None, BATCHES[:1])
    first = report.first_difference
    assert (first.step, first.kind) == (0, "weight")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        slow(optax.adamw(1e-2), optax.adam(1e-2)),
        slow(optax.adamw(1e-4, weight_decay=1e-2), optax.adam(1e-4)),
        (optax.sgd(1e-4), optax.sgd(1.01e-4)),
    ],
    ids=["a small decay", "a decay under a small rate", "a rate that is 1% off"],
)
def test_small_updates_are_compared_with_the_change_of_the_weights(right, wrong):
    batches = [tiny_stack.batch(i) for i in range(3)]
    expected = list(judged(tiny_stack.lower("data=1", optimizer=right), batches))
    assert verify(tiny_stack.lower("data=2", optimizer=right), expected, batches).ok
    report = verify(tiny_stack.lower("data=2", optimizer=wrong), expected, batches)
    assert {c.kind for c in report.comparisons if not c.ok} >= {"weight"}
    assert report.first_difference.kind == "weight"


def own_step(rate):
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(rate))
    graph = nnx.split(Net(nnx.Rngs(0)))[0]

    def step(params, state, batch):
        value, grads = jax.value_and_grad(
            lambda params: loss(nnx.merge(graph, params), batch)
        )(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return optimizer, jax.jit(step, donate_argnums=0)


def test_a_users_own_loop_is_the_judge():
    optimizer, step = own_step(0.1)
    program = lower(layered(), optimizer=optimizer)
    params = nnx.to_pure_dict(nnx.state(Net(nnx.Rngs(1))))
    report = meshpar.verify(program, step, params, BATCHES)
    assert report.ok and str(report).startswith("EQUAL to your loop: 3 steps")
    report = meshpar.verify(program, own_step(0.11)[1], params, BATCHES)
    first = report.first_difference
    assert (first.kind, first.step) == ("weight", 1)
    assert first.tensor.startswith("layers/0/up/")


def test_a_loop_with_other_parameters_is_refused():
    optimizer, step = own_step(0.1)
    program = lower(meshpar.from_nnx(Layer, loss), optimizer=optimizer)
    with pytest.raises(MeshparError, match="lack|no parameters of the model"):
        params = nnx.to_pure_dict(nnx.state(Net(nnx.Rngs(0))))
        meshpar.verify(program, step, params, BATCHES)


def test_a_model_is_no_program():
    with pytest.raises(MeshparError, match="give that of meshpar.lower"):
        meshpar.verify(meshpar.from_nnx(Net, loss), None, {}, BATCHES)


def test_noise_has_no_plain_judge():
    def noisy(net, batch, key=None):
        x = batch["x"] if key is None else jax.random.bernoulli(key, 0.5, (16, WIDTH))
        return loss(net, {**batch, "x": x})

    program = lower(meshpar.from_nnx(Net, noisy))
    assert "random numbers" in reason_no_judge(program)
    with pytest.raises(MeshparError, match="random numbers"):
        verify(program, None, BATCHES)


def test_weights_have_the_names_and_the_order_of_the_module():
    program = lower(layered(), "data=2,pipe=4,microbatches=2")
    module = Net(nnx.Rngs(3))
    found = program.weights(program.init(params=module))
    for i, layer in enumerate(module.layers):
        kernel = np.asarray(layer.up.kernel)
        np.testing.assert_array_equal(found[f"layers/{i}/up/kernel"], kernel)
