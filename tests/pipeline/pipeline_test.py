"""Pipelines: schedules, models and options; common layouts are in matrix_test."""

import functools
import itertools
import math
import random
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.equality import first_step
from support.marks import first, slow
from support.tiny_models import (
    batch,
    host,
    lower,
    model,
    relative_error,
)

import meshpar
from meshpar import layouts, schedules
from meshpar.errors import LayoutError
from meshpar.pipeline.runner import PipelineRunner
from meshpar.pipeline.spec import make_spec
from meshpar.schedules import ZERO_BUBBLE

DEEP = model(depth=8)
MODELS = {
    "deep": DEEP,
    "untied": model(depth=16),
    "tied16": model(depth=16, tied=True, position="learned", norm="layernorm"),
    "noisy": model(depth=4, dropout=0.3),
}


@functools.cache
def alone(of):
    program = lower(meshpar.Layout(), MODELS[of])
    state = program.init(0)
    return host((*program.gradients(state, batch()), program.evaluate(state, batch())))


def assert_equals_one_device(layout, of="deep"):
    program = lower(layout, MODELS[of], optax.sgd(0.1, momentum=0.9))
    assert isinstance(program.lowering.runner, PipelineRunner)
    metrics, gradients = first_step(program, batch())
    want_metrics, want, _ = alone(of)
    assert metrics["loss"] == pytest.approx(want_metrics["loss"], rel=1e-5)
    assert relative_error(gradients, want) < 1e-5
    return program


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["pipe=2,tensor=2,microbatches=2", "pipe=3,microbatches=2"]
)
def test_evaluation_runs_through_the_stages(layout):
    program = lower(layout, DEEP)
    loss = host(program.evaluate(program.init(0), batch()))["loss"]
    assert loss == pytest.approx(alone("deep")[2]["loss"], rel=1e-5)


def every_combination():
    """Every schedule with numbers of stages, other axes, vocab= and save=."""
    other_axes = ("", "data=2", "fsdp=2,zero=1", "fsdp=2,zero=3", "tensor=2")
    kinds = ("gpipe", "1f1b", "interleaved,virtual_stages=2", *ZERO_BUBBLE)
    for kind, stages, other, vocab, save, of in itertools.product(
        kinds,
        (2, 4, 8),
        other_axes,
        ("edge", "pipe"),
        ("inputs", "residuals"),
        ("untied", "tied16"),
    ):
        if stages == 8 and other:
            continue
        num = max(8, 2 * stages) if kind == "dualpipe_v" else 8
        parts = f"pipe={stages}", other, f"microbatches={num},schedule={kind}"
        layout = ",".join([part for part in parts if part])
        yield f"{layout},vocab={vocab},save={save}", of


@pytest.mark.slow
@pytest.mark.parametrize("layout, of", list(every_combination()))
def test_every_combination_equals_one_device(layout, of):
    assert_equals_one_device(layout, of)


def drawn_zero_bubble(seed):
    """A schedule that splits weight gradients off, beside axes of all kinds."""
    rng = random.Random(seed)
    schedule, stages = rng.choice([*ZERO_BUBBLE]), rng.choice((2, 2, 4))
    axes = [("fsdp", 2), ("tensor", 2), ("context", 2), ("data", 2)]
    beside = dict(rng.sample(axes, k=rng.randint(0, 2 if stages == 2 else 1)))
    rows = math.prod(n for axis, n in beside.items() if axis in ("fsdp", "data"))
    num = rng.choice([n for n in (2, 4, 8) if n * rows <= len(batch()["tokens"])])
    if schedule == "dualpipe_v" and num < 2 * stages:
        schedule = "zb_v"
    options = [f"{axis}={n}" for axis, n in beside.items()]
    if "fsdp" in beside:
        options.append(f"zero={rng.choice((1, 2, 3))}")
    options += [f"remat={x}" for x in [rng.choice(("none", "full", "dots"))]]
    options += [f"save={rng.choice(('auto', 'inputs', 'residuals'))}"]
    options += [f"vocab={rng.choice(('edge', 'pipe'))}"]
    options += ["tick_loop=uniform"] * (rng.random() < 0.2)
    return f"pipe={stages},microbatches={num},schedule={schedule},{','.join(options)}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_zero_bubbles_drawn_at_random_equal_one_device(seed):
    program = assert_equals_one_device(drawn_zero_bubble(seed), "untied")
    assert program.violations() == []


class Penalized(nnx.Module):
    """Layers that add to an auxiliary loss, which is part of the activations."""

    def __init__(self, rngs):
        names = ("embed", "mlp")
        self.inside = nnx.Param(rngs.params.normal((4, 8)), out_sharding=names)

        @nnx.split_rngs(splits=4)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def layers(rngs):
            return PenalizedLayer(rngs)

        self.layers = layers(rngs)


class PenalizedLayer(nnx.Module):
    def __init__(self, rngs):
        names = ("embed", "mlp")
        self.w = nnx.Param(rngs.params.normal((8, 8)) / 3, out_sharding=names)

    def __call__(self, x):
        h, penalty = x
        return jnp.tanh(h @ self.w[...]), penalty + jnp.square(h).sum(-1)


def test_auxiliary_losses_travel_with_the_activations():
    def head_loss(_, x, batch):
        h, penalty = x
        error = jnp.square(h - batch["y"]).mean()
        return error + 0.1 * penalty.mean(), {"penalty": penalty.mean()}

    stages = meshpar.LayerStack(
        stack="layers",
        embed=lambda m, b: (b["x"] @ m.inside[...], 0.0 * b["x"][:, 0]),
        layer=lambda layer, x: layer(x),
        head_loss=head_loss,
    )
    penalized = meshpar.from_nnx(Penalized, stages)
    random = np.random.default_rng(0)
    rows = {k: random.normal(size=(8, n)) for k, n in (("x", 4), ("y", 8))}
    rows = {k: x.astype(np.float32) for k, x in rows.items()}
    results = []
    for layout in ("pipe=2,data=2,microbatches=2,virtual_stages=2", "data=1"):
        layout = layouts.parse(layout)
        devices = jax.devices()[: layout.num_devices]
        momentum = optax.sgd(0.1, momentum=0.9)
        program = meshpar.lower(penalized, momentum, layout, rows, devices=devices)
        results.append(first_step(program, rows))
        assert program.violations() == []
    (metrics, gradients), (want_metrics, want) = results
    assert metrics["penalty"] == pytest.approx(want_metrics["penalty"], rel=1e-5)
    assert relative_error(gradients, want) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("save", ["inputs", slow("residuals")])
def test_dropout_does_not_depend_on_the_pipeline(save):
    kind = "schedule=gpipe" if save == "inputs" else "virtual_stages=2,remat=full"
    layout = f"pipe=2,data=2,microbatches=4,save={save},{kind}"
    assert_equals_one_device(layout, "noisy")


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [slow("edge"), "pipe"])
def test_bfloat16_adds_gradients_up_in_float32(vocab):
    layout = f"pipe=2,fsdp=2,microbatches=8,vocab={vocab}"
    program = lower(layout, DEEP, compute_dtype=jnp.bfloat16)
    _, gradients = first_step(program, batch())
    assert 1e-4 < relative_error(gradients, alone("deep")[1]) < 3e-2
    assert program.violations() == []


@pytest.mark.parametrize("schedule", [slow("1f1b"), "interleaved"])
def test_memory_does_not_grow_with_the_microbatches(schedule):
    sizes = []
    for num in (8, 32):
        chunks = 2 if schedule == "interleaved" else 1
        layout = layouts.parse(
            f"pipe=2,microbatches={num},schedule={schedule},virtual_stages={chunks}"
        )
        big = model(depth=4, embed=128, mlp=256)
        rows = {name: np.repeat(x, 2 * num // 16, 0) for name, x in batch().items()}
        program = meshpar.lower(
            big, optax.sgd(0.1), layout, rows, devices=jax.devices()[:2]
        )
        sizes.append(program.compiled.memory_analysis().temp_size_in_bytes)
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)


@mock.patch.dict(schedules.SCHEDULES)
def test_a_registered_schedule_trains():
    @schedules.register("slow")
    def sluggish(num_stages, num_microbatches, num_chunks):
        """1F1B with an idle tick after every tick."""
        fast = schedules.make_schedule("1f1b", num_stages, num_microbatches)
        ticks = [
            {op: 2 * t for op, t in d.items()} for d in (fast.forward, fast.backward)
        ]
        sizes = num_stages, num_microbatches, num_chunks
        return schedules.Schedule("slow", *sizes, *ticks)

    program = assert_equals_one_device("pipe=2,microbatches=2,schedule=slow")
    assert program.violations() == []


def test_schedule_auto_reports_its_choice():
    layout = layouts.parse("pipe=2,microbatches=4,virtual_stages=2")
    assert make_spec(layout, 8).schedule.name == "interleaved"
    odd = make_spec(layout, 6)
    assert odd.schedule.name == "1f1b" and "left aside" in odd.why
    assert make_spec(layouts.parse("pipe=2,microbatches=4"), 6).schedule.name == "1f1b"


def test_models_that_a_pipeline_cannot_run_are_refused():
    def stages(embed):
        return meshpar.LayerStack("layers", embed, layer, loss)

    def layer(layer, x):
        return jnp.tanh(x[0] @ layer.w[...]), x[1]

    def loss(_, x, batch):
        return x[0].mean()

    rows = {"x": np.ones((8, 4), np.float32)}

    def embed(m, b):
        return b["x"] @ m.inside[...], jnp.zeros(len(b["x"]), jnp.int32)

    odd = meshpar.from_nnx(Penalized, stages(embed))
    sgd, two = optax.sgd(0.1), jax.devices()[:2]
    with pytest.raises(LayoutError, match="but it holds int32"):
        meshpar.lower(odd, sgd, "pipe=2,microbatches=2", rows, devices=two)
    own = meshpar.from_nnx(Penalized, stages(embed), lambda m, b: 0.0)
    with pytest.raises(LayoutError, match="evaluation_loss_fn is another function"):
        meshpar.lower(own, sgd, "pipe=2,microbatches=2", rows, devices=two)


class Directions(nnx.Module):
    """Layers that divide by the norm of their weights, which is NaN for padding."""

    def __init__(self, rngs):
        self.inside = nnx.Param(rngs.params.normal((4, 8)), out_sharding=(None, "mlp"))

        @nnx.split_rngs(splits=3)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def layers(rngs):
            return PenalizedLayer(rngs)

        self.layers = layers(rngs)


@pytest.mark.parametrize("kind", first(1, ["zb_h1,partition=1/2", "1f1b", "gpipe"]))
def test_padding_never_reaches_real_layers(kind):
    def layer(layer, x):
        w = layer.w[...]
        return x + jnp.tanh(x @ (w / jnp.linalg.norm(w)))  # NaN where w is 0.

    stages = meshpar.LayerStack(
        stack="layers",
        embed=lambda m, b: b["x"] @ m.inside[...],
        layer=layer,
        head_loss=lambda _, x, b: jnp.square(x).mean(),
    )
    normalized = meshpar.from_nnx(Directions, stages)
    rows = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)}
    results = []
    for layout in (f"pipe=2,microbatches=2,schedule={kind}", "data=1"):
        devices = jax.devices()[: layouts.parse(layout).num_devices]
        momentum = optax.sgd(0.1, momentum=0.9)
        program = meshpar.lower(normalized, momentum, layout, rows, devices=devices)
        metrics, gradients = first_step(program, rows)
        results.append(gradients | {"grad_norm": metrics["grad_norm"]})
    assert relative_error(*results) < 1e-5


def test_few_microbatches_are_told():
    def said(layout):
        return make_spec(layouts.parse(layout), 4).why

    assert "microbatches=1: stages idle 75% of the step" in said("pipe=4")
    assert "microbatches=8 or more" in said("pipe=4")
    assert "idle" not in said("pipe=4,microbatches=4")
