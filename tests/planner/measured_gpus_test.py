"""The planner predicts time and memory of steps that were measured on cards."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend.core import Primitive
from support import tiny_models
from support.gpu_cards import card_of

from experiments.benchmarks import gpu_fit
from meshpar.layouts import parse
from meshpar.mesh.chips import CHIPS
from meshpar.mesh.machine import machine_of
from meshpar.planner.candidate import Candidates
from meshpar.planner.facts import Facts
from meshpar.planner.flops import Kernel, cudnn_kernel


def described(measured):
    return f"{measured.card}, {measured.case.describe()}"


@pytest.fixture(scope="module")
def rows():
    for name in ("h100", "h200"):
        card_of(name)
    return gpu_fit.read()


@pytest.fixture(scope="module")
def fit(rows):
    return gpu_fit.Fit(rows)


def test_steps_take_what_was_foretold(fit, rows):
    found = fit.times(fit.start)[:, 0]
    assert found == pytest.approx([row.ms for row in rows], rel=0.05)


def test_steps_take_what_the_others_foretell(fit, rows):
    assert fit.left_out() == pytest.approx([row.ms for row in rows], rel=0.05)


def test_the_numbers_in_use_are_those_that_fit_best(fit, rows):
    fitted = fit.fitted(range(len(rows)))
    assert fitted == pytest.approx(fit.start, rel=0.02)


@pytest.mark.parametrize("measured", gpu_fit.read(), ids=described)
def test_steps_need_the_memory_that_was_foretold(measured):
    card_of(measured.card)
    found = measured.predicted().memory.total
    assert found == pytest.approx(measured.gb * 1e9, rel=0.02)


@pytest.mark.parametrize("mask, computed", [("CAUSAL", 0.5), ("NO_MASK", 1.0)])
def test_the_kernel_of_attention_is_read_from_a_trace(mask, computed):
    # As jax names and calls cuDNN's, which need not be installed.
    kernel = Primitive("dot_product_attention_fwd_wrapper")
    kernel.def_abstract_eval(lambda q, **_: q)
    q = jax.ShapeDtypeStruct((2, 64, 4, 32), jnp.bfloat16)
    attend = jax.jit(lambda q: kernel.bind(q, mask_type=f"MaskType.{mask}"))
    assert cudnn_kernel(jax.make_jaxpr(attend)(q).jaxpr) == Kernel(32, 64, computed)
    assert cudnn_kernel(jax.make_jaxpr(lambda x: x + 1)(1.0).jaxpr) is None


def test_narrow_heads_and_short_sequences_are_slower():
    machine = machine_of(jax.devices()[:1], chip=CHIPS["h200"])
    narrow, wide = (machine.attention_flops(width, 4096) for width in (64, 128))
    assert narrow < wide < machine.flops
    assert machine.attention_flops(32, 4096) == narrow
    assert machine.attention_flops(256, 4096) == wide
    assert machine.attention_flops(128, 2048) < wide


def test_matmuls_in_float8_are_faster_where_the_chip_has_them():
    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tiny_models.batch()
    )
    devices, model = jax.devices()[:1], tiny_models.model(float8=True)
    facts = Facts(model, optax.adam(1e-2), rows, jnp.bfloat16, devices)
    assert 0 < facts.flops.float8 <= facts.flops.layer
    chip = CHIPS["h200"]
    fast, slow = (
        Candidates(facts, machine_of(devices, chip=one)).candidate(parse("data=1"))
        for one in (chip, dataclasses.replace(chip, float8_speed=1.0))
    )
    rate = machine_of(devices, chip=chip).flops
    saved = 3 * model.layered.depth * tiny_models.BATCH * facts.flops.float8 / 2 / rate
    assert slow.seconds.layers - fast.seconds.layers == pytest.approx(saved)


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
    assert loop.seconds.idle == pytest.approx(2 * 8 * made.machine.idle)
    assert loop.memory.weights == some.memory.weights
    assert loop.memory.weights - none.memory.weights == copies
