"""Parameters after steps of Adam, with the epsilon that optax gives it.

An update of Adam is as large for a tiny gradient as for a large one, so parameters show
differences that losses and gradients hide.
"""

import functools
import itertools

import numpy as np
import optax
import pytest

from tests.support import tiny_models, tiny_stack
from tests.support.marks import slow
from tests.support.tiny_models import host, lower, model, relative_error

LAYOUTS = [
    "data=8",
    "fsdp=8,zero=1",
    "fsdp=8,zero=2",
    "fsdp=8,zero=3",
    "tensor=4",
    "data=2,fsdp=2,tensor=2",
    "fsdp=4,tensor=2,microbatches=2",
    "fsdp=4,remat=full,offload=optimizer+parameters+activations",
]
BY_DEFAULT = [("stack", layout) for layout in (LAYOUTS[3], LAYOUTS[5], LAYOUTS[-1])]
"""Decoders, of either framework, run with `-m slow`."""


@functools.cache
def small_model(framework):
    return model(framework, **({"kv_heads": 4} if framework == "nnx" else {}))


def lowered(layout, framework, **options):
    options = {"optimizer": optax.adamw(1e-2), "clip_norm": 1.0, **options}
    if framework == "stack":
        return tiny_stack.lower(layout, **options)
    return lower(layout, small_model(framework), **options)


def trained(layout, framework, **options):
    program = lowered(layout, framework, **options)
    batch = tiny_stack.batch if framework == "stack" else tiny_models.batch
    state = program.init(0)
    for step in range(3):
        state, _ = program.step(state, batch(step))
    return host(state.params)


@functools.cache
def one_device(framework):
    return trained("data=1", framework)


@pytest.mark.parametrize(
    "framework, layout",
    [
        (pytest.param if row in BY_DEFAULT else slow)(*row)
        for row in itertools.product(("stack", "nnx", "linen"), LAYOUTS)
    ],
)
def test_parameters_equal_one_device(framework, layout):
    params = trained(layout, framework)
    assert relative_error(params, one_device(framework)) < 1e-5


@pytest.mark.parametrize(
    "layout", [slow("data=2,fsdp=2,tensor=2"), slow("fsdp=8,zero=2")]
)
def test_a_layered_model_under_jit_equals_one_device(layout):
    params = trained(layout, "nnx", lowering="jit")
    assert relative_error(params, one_device("nnx")) < 1e-5


def test_the_first_steps_move_every_parameter():
    start = host(lowered("data=1", "stack").init(0).params)
    after = one_device("stack")
    assert all(np.any(after[path] != x) for path, x in start.items())
