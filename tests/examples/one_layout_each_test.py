"""Examples of one axis or mode each: they train as plain loops and recurrences do."""

import itertools
import pathlib

import check_a_step
import long_context
import mixture
import my_run
import numpy as np
import optax
import pipelines
import plan_a_pod
import pytest
import reinforce
import replicas_apart
import resume_elsewhere
from flax import nnx
from support import plain_optax
from support.start_weights import start_of

import meshpar
from experiments import recipes
from meshpar.runs.config import with_settings
from meshpar.runs.data import Place

ROOT = pathlib.Path(__file__).parents[2]


def plain_losses(make, loss, batch, steps):
    """The losses of a plain loop over one batch, by Adam as the examples have it."""
    graph, start = start_of(make, loss)

    def of_params(params, batch):
        value = loss(nnx.merge(graph, params), batch)
        return value[0] if isinstance(value, tuple) else value

    batches = [batch] * steps
    return plain_optax.losses(of_params, start, optax.adam(1e-2), batches)[0]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", pipelines.SCHEDULES)
def test_every_schedule_trains_as_a_plain_loop(schedule):
    batch = pipelines.rows()
    found, _ = pipelines.train(pipelines.SCHEDULES[schedule], batch, steps=4)
    expected = plain_losses(pipelines.Net, pipelines.loss, batch, 4)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data=2,expert=4", "fsdp=2,expert=2"])
def test_a_mixture_trains_as_a_plain_loop(layout):
    found = mixture.train(layout, steps=4)
    expected = plain_losses(mixture.Net, mixture.loss, mixture.sequences(), 4)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp=2,context=4", "context=2,context_mode=ring"])
def test_split_sequences_train_as_a_plain_loop(layout):
    found = long_context.train(layout, steps=4, length=32)
    batch = long_context.sequences(length=32)
    expected = plain_losses(
        lambda rngs: long_context.Net(32, rngs), long_context.loss, batch, 4
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_replicas_apart_follow_the_recurrence_of_local_sgd():
    """In numpy: each descends on its own rows; averages arrive one step late."""
    steps, period, staleness = 10, 4, 1
    _, sent, weights = replicas_apart.train(steps, period, staleness)
    _, start = start_of(replicas_apart.make_model, replicas_apart.loss)
    kernel, bias = (np.array(start[name][...]) for name in ("kernel", "bias"))
    replicas, arriving = [[kernel, bias], [kernel, bias]], {}
    _, *batches = itertools.islice(replicas_apart.batches(), steps + 1)
    for step, batch in enumerate(batches, 1):
        halves = np.split(batch["x"], 2), np.split(batch["y"], 2)
        for replica, x, y in zip(replicas, *halves, strict=True):
            error = 2 * (x @ replica[0] + replica[1] - y) / len(x)
            replica[:] = replica[0] - 0.1 * x.T @ error, replica[1] - 0.1 * error.sum(0)
        if step in arriving:  # An average; what was done since then is kept.
            average, before = arriving[step]
            replicas = [
                [w + now - old for w, now, old in zip(average, *pair, strict=True)]
                for pair in zip(replicas, before, strict=True)
            ]
        if step % period == 0:
            average = [(a + b) / 2 for a, b in zip(*replicas, strict=True)]
            arriving[step + staleness] = average, [list(x) for x in replicas]
    assert [i for i, size in enumerate(sent, 1) if size] == [5, 9]
    for name, a, b in zip(("kernel", "bias"), *replicas, strict=True):
        np.testing.assert_allclose(weights[name], (a + b) / 2, atol=1e-6)


@pytest.mark.slow
def test_a_run_that_goes_on_elsewhere_trains_as_a_plain_loop(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, " * 50)
    settings = {"path": str(text), "width": 32, "depth": 4}
    parts = [("data=4,fsdp=2", 3), ("pipe=4,data=2", 6)]
    found = resume_elsewhere.train(str(tmp_path / "run"), parts, settings)
    config = recipes.get(f"{ROOT}/examples/my_run.py:my_run")
    config = with_settings(config, [f"{k}={v}" for k, v in settings.items()])
    _, run = config.prepared()
    rows = config.batch_size
    batches = run.data.training_batches(Place(rows, range(rows)))
    graph, start = start_of(lambda rngs: my_run.Net(32, 4, rngs), my_run.loss)
    expected, _ = plain_optax.losses(
        lambda params, batch: my_run.loss(nnx.merge(graph, params), batch),
        start,
        optax.adam(1e-3),
        itertools.islice(batches, 6),
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_step_to_check_has_two_findings_and_none_when_it_is_mended():
    found = meshpar.check(*check_a_step.make_step()).findings
    assert {finding.rule for finding in found} == {"donation", "replicated"}
    assert meshpar.check(*check_a_step.make_step(mended=True)).findings == ()


@pytest.mark.slow
def test_a_policy_learns_from_its_own_samples():
    rewards = reinforce.train("data=2,fsdp=4", steps=80)
    assert rewards[0] < 0.3 and min(rewards[-10:]) > 0.9


@pytest.mark.slow
def test_the_plan_of_a_pod_fits_its_chips():
    plans = plan_a_pod.plan("v5p:4x4x2")
    assert plans.best[0].memory.total < 95e9
    layer = plan_a_pod.WIDTH**2 * (4 + 2 * 4)
    flops = 6 * plan_a_pod.DEPTH * layer * plan_a_pod.ROWS * plan_a_pod.LENGTH
    assert plans.best[0].seconds.total > flops / 32 / 459e12  # v5p: 459 TFLOP/s.
