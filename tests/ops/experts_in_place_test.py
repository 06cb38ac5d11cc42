"""Grouped matmuls on TPUs read the matrices of a layer in the stack of all layers.

Run here on CPUs, which have `lax.ragged_dot` too.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import equality
from support.marks import slow
from support.tiny_models import batch, lower, model

from meshpar import layouts
from meshpar.jaxprs.walk import equations
from meshpar.layouts.stacks import InStack, standing
from meshpar.mesh import platform
from meshpar.ops.experts.grouped_matmul import by_ragged_dots

DEPTH, E, S, D, F = 3, 4, 32, 6, 10
SIZES = jnp.array([5, 0, 17, 8], jnp.int32)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def groups_read(jaxpr):
    """The number of matrices that each grouped matmul of a jaxpr reads."""
    found = (eqn for eqn in equations(jaxpr) if "ragged_dot" in eqn.primitive.name)
    shapes = (eqn.invars[1].aval.shape for eqn in found)
    return [shape[0] for shape in shapes if len(shape) == 3]


def test_matrices_of_a_layer_are_groups_of_the_whole_stack():
    x, stacks = normal(0, S, D), [normal(seed, DEPTH, E, D, F) for seed in (1, 2)]

    def outputs(x, weights, row, in_place):
        places = [InStack(stack, row) if in_place else None for stack in stacks]
        with standing(zip(weights, places, strict=True)):
            up, gate = by_ragged_dots(x, weights, SIZES)
        return jnp.sum(jnp.sin(up) * gate)

    for row in range(DEPTH):
        weights, at = [stack[row] for stack in stacks], jnp.int32(row)
        both = [
            jax.value_and_grad(outputs, (0, 1))(x, weights, at, in_place)
            for in_place in (True, False)
        ]
        jax.tree.map(np.testing.assert_array_equal, *both)
    jaxpr = jax.make_jaxpr(outputs, static_argnums=3)(x, weights, at, True)
    assert groups_read(jaxpr.jaxpr) == [DEPTH * E, DEPTH * E]


CASES = [
    "pipe=2,tensor=2,microbatches=2,remat=full",
    slow("pipe=2,expert=2,microbatches=2,schedule=zb_h1"),
    slow("pipe=2,tensor=2,microbatches=2,virtual_stages=2"),
    slow("expert=2,tensor=2,microbatches=2"),
    slow("fsdp=2,expert=2,remat=full,zero=1"),
]


@functools.cache
def one_device(microbatches):
    return equality.record(program(f"data=1,microbatches={microbatches}"), [batch(0)])


def program(layout):
    sizes = dict(depth=8, kv_heads=4, mlp=32, num_experts=8, routing="dropless")
    return lower(layout, model(**sizes), optax.adamw(1e-2, eps=1e-2))


@pytest.mark.parametrize("text", CASES)
def test_layouts_train_as_one_device_does(text, monkeypatch):
    layout = layouts.parse(text)
    reference = one_device(layout.microbatches)
    for module in ("ops.experts.grouped_matmul", "fsdp.layer_scan"):
        owner = sys.modules[f"meshpar.{module}"]  # A function has its name, too.
        monkeypatch.setattr(owner, "traced_platform", lambda: platform.TPU)
    tested = program(layout)
    groups = 8 // layout.expert * (8 // layout.pipe)
    assert groups in groups_read(tested.inspection.traced.jaxpr.jaxpr)
    report = equality.compare(tested, reference, [batch(0)])
    assert report.ok, report.problem
