"""What a trace of one layer says of its bytes."""

import jax
from support import tiny_stack

from meshpar.lowering.layer_trace import trace_layer


def test_a_split_backward_pass_keeps_input_and_gradient_of_each_matmul():
    program = tiny_stack.lower("pipe=2,microbatches=4,schedule=zb_h1")
    batch = jax.eval_shape(tiny_stack.batch)
    traced = trace_layer(program.model.layered, program.plan, program.mesh, batch)
    assert traced.x == tiny_stack.BATCH // 4 * tiny_stack.DIM * 4
    assert traced.deferred == 2 * traced.x
