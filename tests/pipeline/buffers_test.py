"""Buffers between the ticks of a pipeline, as compilers for TPUs lay them out."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import SingleDeviceSharding
from support.marks import slow
from support.tiny_models import lower, model
from support.tpu_programs import tpu

from meshpar import mesh
from meshpar.fsdp import memory_order
from meshpar.jaxprs.walk import equations
from meshpar.mesh import platform
from meshpar.pipeline import buffers


@pytest.mark.parametrize(
    "shape, order",
    [
        ((), ()),
        ((3,), (0,)),
        ((2, 4, 1024, 256), (0, 1, 2, 3)),
        ((2, 4, 1024, 12, 64), (0, 1, 3, 4, 2)),
        ((2, 128, 1024, 12), (0, 1, 3, 2)),
        ((2, 4, 12, 64), (0, 1, 2, 3)),
    ],
)
def test_the_dim_that_fills_whole_tiles_varies_fastest(shape, order):
    assert memory_order._order(shape).major_to_minor == order


@pytest.mark.parametrize(
    "beside, diverges", [slow("data=2", True), ("context=2", False)]
)
def test_what_conditionals_save_for_others_has_one_order(beside, diverges, monkeypatch):
    """Stages with collectives of their own run in lock step, without conditionals."""
    monkeypatch.setattr(memory_order, "traced_platform", lambda: platform.TPU)
    program = lower(f"pipe=2,{beside},microbatches=2,schedule=zb_h1")
    eqns = equations(program.inspection.traced.jaxpr.jaxpr)
    fixed = any(eqn.primitive.name == "layout_constraint" for eqn in eqns)
    assert fixed == diverges


@pytest.mark.parametrize(
    "options, moved_layers",
    [
        ("save=residuals", 1),
        ("schedule=zb_h1", 1),
        ("schedule=zb_h1,context=2", 3),
    ],
)
def test_layers_read_and_write_their_rows_of_saved_values_in_place(
    options, moved_layers
):
    """A whole slot that is taken out or put in is a copy of what all layers save.

    Those are copied where stages in lock step split off W.
    """
    layers = 3
    layout = f"pipe=2,microbatches=4,{options}"
    program = lower(layout, of=model(depth=2 * layers))
    moved = set()
    for eqn in equations(program.inspection.traced.jaxpr.jaxpr):
        if eqn.primitive.name == "dynamic_slice":
            buffer, part = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        elif eqn.primitive.name == "dynamic_update_slice":
            buffer, part = (x.aval.shape for x in eqn.invars[:2])
        else:
            continue
        if len(buffer) >= 5 and buffer[1] == layers:  # [slot, layer, row, token, ...].
            moved.add((eqn.primitive.name, part[:2]))
    part = 1, moved_layers
    assert moved == {("dynamic_slice", part), ("dynamic_update_slice", part)}


@tpu
def test_conditionals_that_write_and_read_a_buffer_copy_no_more_than_a_slot(
    monkeypatch,
):
    monkeypatch.setattr(memory_order, "traced_platform", lambda: platform.TPU)
    (device, *_) = mesh.topology("v5e:2x2")
    slots, depth, tokens, width = 3, 2, 512, 256

    def summed(xs, ys, w, ticks):
        def tick(carry, at):
            def write(buffer):
                def layer(x, _):
                    x = jnp.tanh(x @ w)
                    return x, x

                saved = lax.scan(layer, xs[at], jnp.arange(depth))[1]
                saved = memory_order.in_one_order(saved)
                return memory_order.in_one_order(buffers.put_slot(buffer, at, saved))

            def read(total):
                def layer(total, x):
                    return total + jnp.einsum("bld,ble->de", x, ys[at]), None

                saved = memory_order.in_one_order(buffers.take_slot(buffer, at))
                return lax.scan(layer, total, saved)[0]

            buffer, total = carry
            buffer = lax.cond(at > 0, write, lambda x: x, buffer)
            return (buffer, lax.cond(at < 2, read, lambda x: x, total)), None

        buffer = jnp.zeros((slots, depth, *xs.shape[1:]), xs.dtype)
        total = jnp.zeros((width, width), xs.dtype)
        return lax.scan(tick, (buffer, total), ticks)[0][1]

    def like(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    x, w = like(slots, 4, tokens, width), like(width, width)
    ticks = like(8, dtype=jnp.int32)
    text = jax.jit(summed).lower(x, x, w, ticks).compile().as_text()
    assert not re.search(rf"= bf16\[{slots},{depth},4,\S+ copy\(", text)
