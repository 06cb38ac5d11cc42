"""Terms of a step's predicted time, each against its formula."""

import jax
import optax
import pytest
from support import tiny_models, tiny_stack

from meshpar.layouts.layout import parse
from meshpar.lowering.layer_trace import trace_layer
from meshpar.mesh.machine import machine_of
from meshpar.planner import seconds
from meshpar.planner.candidate import Candidates
from meshpar.planner.facts import Facts

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
