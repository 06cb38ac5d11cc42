"""Terms of a step's predicted time, each against its formula."""

import jax
import optax
import pytest
from support import tiny_models, tiny_stack
from support.tpu_programs import tpu

from meshpar import mesh
from meshpar.contracts.cost import Link
from meshpar.contracts.declared import DeclaredCollective
from meshpar.layouts.layer_uses import FEATURES, ROWS
from meshpar.layouts.layout import parse
from meshpar.lowering.layer_trace import trace_layer
from meshpar.mesh.machine import machine_of
from meshpar.pipeline.stage_memory import backward_buffers
from meshpar.planner import seconds
from meshpar.planner.candidate import Candidates
from meshpar.planner.facts import Facts
from meshpar.planner.transfers import Moved

NONE = seconds.Factors(*[0.0] * len(seconds.Factors._fields))


def test_a_head_loops_over_its_part_of_a_sequence():
    """Two devices have as many tokens each; along `context`, half as many blocks."""
    config = tiny_models.config(loss_block=4)
    model, devices = config.make_model(), jax.devices()[:2]
    batch = jax.eval_shape(tiny_models.batch)
    made = Candidates(
        Facts(model, optax.adamw(1e-2), batch, None, devices), machine_of(devices)
    )
    rows, length = (made.candidate(parse(x)) for x in ("data=2", "context=2"))
    looped = seconds.FACTORS.looped * made.facts.flops.looped
    saved = looped / 2 / made.machine.chip.memory_bandwidth
    assert saved > 0
    assert rows.seconds.outside - length.seconds.outside == pytest.approx(saved)


@pytest.mark.parametrize("name, rows", [("grouped", 5), ("hidden", 3)])
def test_rows_of_grouped_matmuls_count_in_each_pass(name, rows):
    program = tiny_stack.lower("data=2")
    runner, args = program.lowering.runner, (program.plan, program.mesh)
    batch = jax.eval_shape(tiny_stack.batch)
    traced = trace_layer(program.model.layered, *args, batch)
    traced = traced._replace(grouped=3, grouped_whole=5)
    depth = program.model.layered.depth
    for own in (name, f"{name}_backward"):
        factors = NONE._replace(**{own: 2.0})
        found = seconds._grouped_moves(runner, traced, factors)
        assert found == 2 * depth * rows


def candidates(topology, **sizes):
    """Predicts layouts of a tiny model on a machine."""
    model, devices = tiny_models.model(**sizes), mesh.topology(topology)
    batch = jax.eval_shape(tiny_models.batch)
    facts = Facts(model, optax.adamw(1e-2), batch, "bfloat16", devices)
    return Candidates(facts, machine_of(devices))


def test_rings_that_add_up_count_apart_from_those_that_gather():
    def term(kind, size, gathers=False):
        return DeclaredCollective(kind, ("fsdp",), 4, 3, size, "", gathers=gathers)

    sums = term("permute", 30), term("permute", 500, gathers=True)
    rows = term("permute", 7), term("reduce_scatter", 9000)
    links = Link(1e9)
    moved = Moved.of(FEATURES, sums, lambda _: links)
    moved = moved.plus(Moved.of(ROWS, rows, lambda _: links))
    assert moved.ring_sums == 37


@tpu
def test_what_compute_does_not_hide_counts_more_where_transfers_stand_beside_it(
    monkeypatch,
):
    made, found = candidates("v5p:2x2x1"), []
    for exposed in (1.0, 3.0):
        factors = seconds.FACTORS._replace(exposed=exposed)
        monkeypatch.setattr(seconds, "FACTORS", factors)
        found.append(made.candidate(parse("fsdp=2,tensor=2")).seconds)
    once, thrice = found
    assert once.state > 0 and once.tensor > 0 and once.latency == thrice.latency
    assert thrice.state == pytest.approx(3 * once.state)
    assert thrice.tensor == pytest.approx(3 * once.tensor)


@tpu
def test_a_layer_s_experts_are_copied_where_they_are_gathered():
    made = candidates("v5p:2x2x1", num_experts=4, routing="dropless", mlp=128)
    for zero, copied in ((3, 2 * 3 * 32 * 128 * 2), (2, 0)):
        layout = parse(f"fsdp=2,expert=2,zero={zero}")
        assert made._shared(layout).lowering.runner.copied_experts == copied


@tpu
@pytest.mark.parametrize(
    "topology, layout, buffers",
    [
        ("v5e:2x2", "pipe=2,data=2,microbatches=4", 2),
        ("v5e:2x2", "pipe=2,fsdp=2,zero=2,microbatches=4", 2),
        ("v5e:2x2", "pipe=2,fsdp=2,zero=3,microbatches=4", 1),
        ("v5e:2x2", "pipe=2,tensor=2,microbatches=4", 1),
        ("v6e:2x2", "pipe=2,data=2,microbatches=4", 1),
    ],
)
def test_a_tick_outside_of_loops_has_residuals_of_its_own(topology, layout, buffers):
    """As compiled for such machines (docs/measured_plans.md, draws 2 and 34)."""
    made = candidates(topology)
    runner = made._shared(parse(layout)).lowering.runner
    assert runner.loop.num_backward_buffers == 2
    found = backward_buffers(runner.frame, runner.zero, runner.loop)
    assert found == buffers
