"""Progressive layer dropping: what runs is what the schedule says, on all devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import tiny_stack
from support.marks import first, slow

import meshpar
from meshpar.errors import MeshparError
from meshpar.methods import layer_dropping

DEPTH, STEPS = 4, 6


def counting_model():
    """The tiny stack, whose activations also count the layers that they pass."""

    def head_loss(net, x, batch):
        rows_BD, count_B = x
        loss, aux = tiny_stack.head_loss(net, rows_BD, batch)
        rows = jnp.ones_like(count_B).sum()
        return loss, {**aux, "layers": meshpar.metrics.Mean(count_B.sum(), rows)}

    stack = meshpar.LayerStack(
        stack="layers",
        embed=lambda net, batch: (batch["x"], jnp.zeros_like(batch["y"])),
        layer=lambda linear, x: (x[0] + jnp.tanh(linear(x[0])), x[1] + 1),
        head_loss=head_loss,
    )
    return meshpar.from_nnx(tiny_stack.Net, stack)


def half(step):
    return 0.5


def lowered(layout, schedule, model=None, lowering=""):
    model = model or tiny_stack.model()
    if schedule is not None:
        model = layer_dropping.with_dropped_layers(model, schedule)
    layout = meshpar.layouts.parse(layout)
    optimizer, batch = optax.adamw(1e-2, eps=1e-2), tiny_stack.batch()
    devices = jax.devices()[: layout.num_devices]
    return meshpar.lower(
        model, optimizer, layout, batch, devices=devices, lowering=lowering
    )


def trained(program, steps=STEPS):
    state, rows = program.init(), []
    for step in range(steps):
        state, metrics = program.step(state, tiny_stack.batch(step))
        rows.append({name: float(x) for name, x in metrics.items()})
    state = program.in_model_order(state)
    return jax.tree.map(np.asarray, state.params), rows


def test_the_schedule_falls_as_published():
    theta = layer_dropping.progressive(0.5, 1000)
    assert float(theta(0.0)) == 1
    assert float(theta(10.0)) == pytest.approx(0.5 * np.exp(-1) + 0.5)
    assert float(theta(1000.0)) == pytest.approx(0.5)
    keep = layer_dropping.keep_probability(lambda t: 0.6, 0, np.arange(4), 4)
    np.testing.assert_allclose(keep, [1, 0.9, 0.8, 0.7], rtol=1e-6)
    with pytest.raises(MeshparError, match="use a probability above 0"):
        layer_dropping.progressive(0.0, 10)


def test_coins_have_the_probabilities_of_the_schedule():
    found = layer_dropping.layers_run(half, 2000, DEPTH)
    np.testing.assert_allclose(found.mean(axis=0), [1, 0.875, 0.75, 0.625], atol=0.03)
    assert not np.array_equal(
        found, layer_dropping.layers_run(half, 2000, DEPTH, seed=1)
    )


@pytest.fixture(scope="module")
def one_device():
    """Parameters and metrics of training with dropped layers on one device."""
    return trained(lowered("data=1", lambda t: 0.2, counting_model()))


LAYOUTS = [
    "data=2,fsdp=2,microbatches=2",
    slow("pipe=2,microbatches=4"),
    slow("fsdp=2,remat=full"),
    slow("fsdp=2,tensor=2"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_devices_decide_alike(one_device, layout):
    program = lowered(layout, lambda t: 0.2, counting_model())
    params, rows = trained(program)
    for path, x in one_device[0].items():
        np.testing.assert_allclose(params[path], x, rtol=0, atol=2e-5, err_msg=path)
    ran = layer_dropping.layers_run(lambda t: 0.2, STEPS, DEPTH)
    keep = layer_dropping.keep_probability(lambda t: 0.2, 0, np.arange(DEPTH), DEPTH)
    found = [row["layers"] for row in rows]  # Each counts 1 over its probability.
    np.testing.assert_allclose(found, (ran / np.asarray(keep)).sum(axis=1), rtol=1e-5)
    assert len(set(ran.sum(axis=1))) > 1  # Some steps run fewer layers than others.
    if "pipe" not in layout:  # The counter has no gradient that would be sent back.
        assert program.violations() == []


def test_the_program_branches(one_device):
    del one_device
    text = lowered("data=1", half).lowered.as_text()
    assert "stablehlo.case" in text
    assert "stablehlo.case" not in lowered("data=1", None).lowered.as_text()


@pytest.mark.parametrize("lowering", first(1, ["shard_map", "jit"]))
def test_keep_1_is_the_baseline_bit_for_bit(lowering):
    kept, rows = trained(lowered("fsdp=2", lambda t: 1.0, lowering=lowering))
    params, wanted = trained(lowered("fsdp=2", None, lowering=lowering))
    assert rows == wanted
    for path, x in params.items():
        np.testing.assert_array_equal(kept[path], x)


def test_evaluation_runs_all_layers():
    program = lowered("data=1", lambda t: 0.1, counting_model())
    state = program.init()
    assert float(program.evaluate(state, tiny_stack.batch())["layers"]) == DEPTH


def test_models_that_cannot_drop_layers():
    def make(rngs):
        return nnx.Linear(3, 1, rngs=rngs)

    model = meshpar.from_nnx(make, lambda linear, x: linear(x).mean())
    with pytest.raises(MeshparError, match="name them"):
        layer_dropping.with_dropped_layers(model, half)
