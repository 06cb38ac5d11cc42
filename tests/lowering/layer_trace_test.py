"""The bytes of one layer, as its trace says them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import tiny_stack
from support.tpu_programs import small, tpu

import meshpar
from meshpar import mesh
from meshpar.jaxprs.walk import Written
from meshpar.lowering.layer_trace import trace_layer, trace_policies
from meshpar.runs.config import with_settings


def test_a_split_backward_pass_keeps_input_and_gradient_of_each_matmul():
    program = tiny_stack.lower("pipe=2,microbatches=4,schedule=zb_h1")
    batch = jax.eval_shape(tiny_stack.batch)
    traced = trace_layer(program.model.layered, program.plan, program.mesh, batch)
    assert traced.x == tiny_stack.BATCH // 4 * tiny_stack.DIM * 4
    assert traced.deferred == 2 * traced.x


@pytest.mark.parametrize("marks", [False, True])
def test_a_layer_without_marks_of_its_own_runs_once_for_all_policies(
    marks, monkeypatch
):
    """Its jaxpr runs once more for all policies that rematerialize."""
    calls, repeats, repeat = [], [], Written.__call__
    monkeypatch.setattr(
        Written, "__call__", lambda *args: repeats.append(None) or repeat(*args)
    )

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            calls.append(None)
            run = meshpar.layouts.remat(self.dense) if marks else self.dense
            return x + jnp.tanh(run(x))

    def net(rngs):
        return nnx.Sequential(Layer(rngs), Layer(rngs))

    def loss(net, batch):
        return jnp.square(net(batch["x"])).mean()

    batch = {"x": np.ones((8, 8), np.float32)}
    model = meshpar.from_nnx(net, loss, layers="layers")
    program = meshpar.lower(model, optax.sgd(0.1), "data=8,remat=full", batch)
    args = model.layered, program.plan, program.mesh, program.abstract_batch
    counts = []
    for policies in (["none"], ["none", "dots", "full"]):
        calls.clear()
        repeats.clear()
        found = trace_policies(*args, policies)
        counts.append((len(calls), len(repeats)))
    (calls_of_one, repeats_of_one), (calls_of_all, repeats_of_all) = counts
    assert calls_of_all - calls_of_one == (2 if marks else 0)
    assert repeats_of_all - repeats_of_one == (0 if marks else 1)
    sizes = [found[policy].saved for policy in ("full", "dots", "none")]
    assert sizes[0] < sizes[1] <= sizes[2]


def traced(layout, settings=()):
    """The trace of a small decoder's layer, with attention kernels of TPUs."""
    config = with_settings(small(), settings)
    devices = mesh.topology("v5e:2x4")
    program = config.make_program(meshpar.layouts.parse(layout), devices)
    layered, batch = program.model.layered, program.step_batch
    return trace_layer(layered, program.plan, program.mesh, batch)


@tpu
def test_a_stage_saves_what_its_own_rows_need():
    """As many rows on each device, once in a pipeline and once without."""
    deeper = ["model.depth=4"]
    alone = traced("data=8,microbatches=4", deeper)
    stage = traced("pipe=4,data=2,microbatches=16", deeper)
    # Small constants, which devices share, are counted in parts.
    assert stage.saved == pytest.approx(alone.saved, rel=0.02)
    assert stage.running == pytest.approx(alone.running, rel=0.02)


@pytest.mark.slow
@tpu
def test_grouped_matmuls_read_and_write_rows_of_the_worst_case():
    """Each device keeps place for the rows of all devices along `expert`."""
    settings = ["model.num_experts=4", "model.routing=dropless", "model.mlp=512"]
    alone = traced("data=8", settings).grouped
    spread = traced("data=4,expert=2", settings).grouped
    assert 1.5 * alone < spread < 2.5 * alone
    assert traced("data=8").grouped == 0
