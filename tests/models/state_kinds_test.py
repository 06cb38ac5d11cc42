"""Kinds of running state, and their values under microbatches and in replicas."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import resnets
from support.marks import slow
from support.state_models import (
    COUNTING,
    ROWS,
    SPECTRAL,
    WIDTH,
    Counting,
    changing,
    lower,
    rows,
    squared,
    squared_in_evaluation,
    train,
)
from support.tiny_models import host

import meshpar
from meshpar.errors import LayoutError

CONSTANTS = {"shift", "host_shift", "listed/0"}


@pytest.mark.parametrize(
    "layout", [slow("data=8"), slow("fsdp=8"), "data=2,microbatches=4"]
)
@pytest.mark.parametrize(
    "model", [COUNTING, slow(SPECTRAL)], ids=["counting", "spectral"]
)
def test_state_of_every_kind_equals_one_device(model, layout):
    results = []
    if model is SPECTRAL and "fsdp" in layout:  # It takes no boxed parameters.
        layout += ",paths.^Dense_0/kernel=embed/none"
    for text in ("data=1", layout):
        program = lower(model, text)
        begin = host(program.init(0).params)
        state, losses = train(program, 3)
        results.append((losses, host(state.params)))
    (want_losses, want), (losses, found) = results
    assert losses == pytest.approx(want_losses, rel=1e-5)
    paths = [path for path, param in model.params.items() if param.is_state]
    assert len(paths) == (5 if model is COUNTING else 2)
    for path in paths:
        assert (found[path] != begin[path]).any() == (path not in CONSTANTS), path
        np.testing.assert_allclose(found[path], want[path], 1e-5, 1e-6, err_msg=path)
    if model is COUNTING:
        assert found["count"] == 3 and found["count"].dtype == np.int32


def test_state_that_microbatches_do_not_see_is_that_of_one_of_them():
    """Exactly: a third plus a third plus a third is not always the whole."""
    data = {name: x[:15] for name, x in rows().items()}
    states = []
    for layout in ("data=1", "data=1,microbatches=3"):
        program = meshpar.lower(
            *(SPECTRAL, optax.sgd(0.1), layout, data), devices=jax.devices()[:1]
        )
        states.append(host(program.step(program.init(0), data)[0].params))
    for path, param in SPECTRAL.params.items():
        if param.is_state:
            np.testing.assert_array_equal(*(state[path] for state in states))


@pytest.mark.parametrize(
    "value, words",
    [
        (lambda old, x: old + x.max(), "reduce_max"),
        (lambda old, x: old + x.sum(), "is a sum over rows"),
        (lambda old, x: old + x.shape[0], "the number of rows"),
        (lambda old, x: old + x.var(), "square|integer_pow|enters single rows"),
    ],
)
def test_other_state_is_refused_by_name_under_microbatches(value, words):
    model = changing(value)
    with pytest.raises(LayoutError, match=f"new value of seen .*({words}).*LayerNorm"):
        lower(model, "data=1,microbatches=2")
    program = lower(model, "data=8")  # The whole batch is seen at once.
    state = train(program, 1)[0]
    want = value(0.0, jnp.asarray(rows()["x"]))
    np.testing.assert_allclose(state.params["seen"], want, rtol=1e-5)


def test_batch_statistics_are_refused_under_microbatches(framework):
    with pytest.raises(LayoutError, match="as in batch normalization.*microbatches=2"):
        resnets.lower(framework, "data=1,microbatches=2")


def test_replicas_keep_their_own_state_and_average_it():
    model = COUNTING
    mode = meshpar.LocalSGD(period=2)
    program = lower(model, "replica=2,data=2", mode=mode, optimizer=optax.sgd(0.1))
    state, _ = program.step(program.init(0), rows())
    means = host(state.params["mean"])
    halves = rows()["x"].reshape(2, ROWS // 2, WIDTH)
    np.testing.assert_allclose(means, 0.25 * halves.mean(axis=1), rtol=1e-5)
    average = host(program.weights(state))
    np.testing.assert_allclose(average["mean"], means.mean(axis=0), rtol=1e-6)
    assert average["count"] == 1
    alone = lower(model, "data=1")
    want = alone.evaluate_params(jax.tree.map(jnp.asarray, average), rows())["loss"]
    found = program.evaluate(state, rows())["loss"]
    assert float(found) == pytest.approx(float(want), rel=1e-5)


def test_state_keeps_its_dtype_inside_the_loss():
    kinds = set()

    def loss(module, batch):
        arrays = module.linear.kernel, module.mean, module.shift
        kinds.add(tuple(x.dtype.name for x in arrays))
        return squared(module, batch)

    model = meshpar.from_nnx(Counting, loss)
    program = lower(model, "data=2", compute_dtype=jnp.bfloat16)
    state, _ = program.step(program.init(0), rows())
    assert ("bfloat16", "float32", "float32") in kinds
    want = 0.25 * rows()["x"].mean(axis=0)
    np.testing.assert_allclose(state.params["mean"], want, rtol=1e-5)


def test_batch_statistics_of_replicas_need_a_loss_that_counts_each_by_itself():
    mode, options = meshpar.LocalSGD(period=2), {"optimizer": optax.sgd(0.1)}
    with pytest.raises(LayoutError, match=r"aux\['weight'\].*replica=2"):
        resnets.lower("nnx", "replica=2", mode=mode, **options)

    def weighted(net, batch):
        return resnets.cross_entropy(net(batch["image"]), batch), {"weight": 1.0}

    model = meshpar.from_nnx(resnets.NnxResNet, weighted)
    program = resnets.lower("nnx", "replica=2", model, mode=mode, **options)
    state, _ = program.step(program.init(0), resnets.batch())
    halves = {name: x[: resnets.ROWS // 2] for name, x in resnets.batch().items()}
    alone = meshpar.lower(
        model, layout="data=1", batch=halves, devices=jax.devices()[:1], **options
    )
    want = alone.step(alone.init(0), halves)[0].params
    for path, param in model.params.items():
        if param.is_state:
            first, second = np.asarray(state.params[path])
            np.testing.assert_allclose(first, want[path], rtol=1e-5, atol=1e-6)
            assert (first != second).any()


class NamedAxis(nn.Module):
    """A model as they are written for `jax.pmap`."""

    axis_name: str | None = "batch"

    @nn.compact
    def __call__(self, x_BD, train=True):
        x_BD = nn.Dense(WIDTH)(x_BD)
        norm = nn.BatchNorm(not train, momentum=0.9, axis_name=self.axis_name)
        return norm(x_BD)


def test_a_named_axis_averages_over_the_whole_batch():
    example, states = jnp.ones((1, WIDTH)), []
    for module, name in ((NamedAxis(None), ""), (NamedAxis(), "batch")):
        losses = squared, example, squared_in_evaluation
        model = meshpar.from_linen(module, *losses, axis_name=name)
        program = lower(model, "data=8")
        state, _ = train(program, 2)
        evaluated = program.evaluate(state, rows())["loss"]
        states.append({**host(state.params), "evaluated": np.asarray(evaluated)})
    want, found = states
    for path, x in want.items():
        np.testing.assert_allclose(found[path], x, 1e-5, 1e-6, err_msg=path)
    model = meshpar.from_linen(NamedAxis(), *losses)
    with pytest.raises(ValueError, match="give axis_name='batch' to from_linen"):
        lower(model, "data=8")
