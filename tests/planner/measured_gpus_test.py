"""Predicted time and memory of steps that were measured on cards."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend.core import Primitive
from support import tiny_models
from support.gpu_cards import card_of, predicted

from experiments.benchmarks.gpu_cases import LARGE, LENGTH, SMALL, Case
from meshpar.layouts import parse
from meshpar.mesh.chips import CHIPS
from meshpar.mesh.machine import machine_of
from meshpar.planner.candidate import Candidates
from meshpar.planner.facts import Facts
from meshpar.planner.flops import Kernel, cudnn_kernel

MEASURED = [
    # Milliseconds and GB of docs/performance.md, jax 0.11.2. Those of one program on
    # two days are 3% apart.
    ("h200", Case(SMALL, LENGTH, 4), 310.0, 20.3),
    ("h200", Case(SMALL, LENGTH, 8, "dots"), 516.5, 48.3),
    ("h200", Case(SMALL, LENGTH, 8, "none"), 566.7, 114.2),
    ("h200", Case(SMALL, 2 * LENGTH, 2), 376.1, 20.3),
    ("h200", Case(SMALL, LENGTH, 16, "dots", 22), 962.6, 76.6),
    ("h200", Case(LARGE, LENGTH, 4), 796.0, 55.4),
    ("h200", Case(LARGE, LENGTH, 4, "dots"), 688.4, 80.9),
    ("h200", Case(LARGE, LENGTH, 8, "dots"), 1299.5, 110.5),
    ("h200", Case(LARGE, 2 * LENGTH, 2), 905.0, 55.4),
    ("h200", Case(LARGE, LENGTH, 8, "dots", 28), 1279.8, 104.7),
    ("h100", Case(SMALL, LENGTH, 4), 323.4, 20.3),
    ("h100", Case(SMALL, LENGTH, 8, "dots"), 532.3, 48.3),
    ("h100", Case(SMALL, LENGTH, 8, "dots", 22), 505.1, 45.9),
]


@pytest.mark.parametrize("card, case, ms, gb", MEASURED)
def test_steps_take_what_was_foretold(card, case, ms, gb):
    found = predicted(case, card_of(card))
    assert found.seconds.total == pytest.approx(ms / 1e3, rel=0.05)
    assert found.memory.total == pytest.approx(gb * 1e9, rel=0.02)


@pytest.mark.parametrize("mask, computed", [("CAUSAL", 0.5), ("NO_MASK", 1.0)])
def test_the_kernel_of_attention_is_read_from_a_trace(mask, computed):
    # As jax names and calls cuDNN's, which need not be installed.
    kernel = Primitive("dot_product_attention_fwd_wrapper")
    kernel.def_abstract_eval(lambda q, **_: q)
    q = jax.ShapeDtypeStruct((2, 64, 4, 32), jnp.bfloat16)
    attend = jax.jit(lambda q: kernel.bind(q, mask_type=f"MaskType.{mask}"))
    assert cudnn_kernel(jax.make_jaxpr(attend)(q).jaxpr) == Kernel(32, computed)
    assert cudnn_kernel(jax.make_jaxpr(lambda x: x + 1)(1.0).jaxpr) is None


def test_narrow_heads_are_slower():
    machine = machine_of(jax.devices()[:1], chip=CHIPS["h200"])
    narrow, wide = (machine.attention_flops(width) for width in (64, 128))
    assert narrow < wide < machine.flops
    assert machine.attention_flops(32) == narrow
    assert machine.attention_flops(256) == wide


def test_layers_without_a_loop_make_no_stacks():
    model, rows = tiny_models.standard_model(), tiny_models.batch()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows)
    devices = jax.devices()[:1]
    facts = Facts(model, optax.adam(1e-2), shapes, jnp.bfloat16, devices)
    made = Candidates(facts, machine_of(devices, chip=CHIPS["h200"]))
    loop, some, none = (
        made.candidate(parse(f"data=1,remat=dots,scan_unroll={count}"))
        for count in (1, 4, 8)
    )
    assert loop.seconds.saved == some.seconds.saved > none.seconds.saved == 0
    stack = model.layered.split(model.params)[1].values()
    copies = sum(2 * math.prod(param.shape) for param in stack)
    assert loop.memory.weights == some.memory.weights
    assert loop.memory.weights - none.memory.weights == copies
