"""When a TPU program gives memory to gradients that are reduced once a step."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny_stack
from support.tpu_programs import tpu

import meshpar
from meshpar import layouts, mesh
from meshpar.fsdp import zero
from meshpar.mesh import platform


@tpu
def test_shards_of_gradients_get_memory_after_the_passes():
    program = meshpar.lower(
        tiny_stack.model(128),
        optax.sgd(1e-2),
        layouts.parse("fsdp=4,zero=2,microbatches=2"),
        tiny_stack.batch(dim=128),
        devices=mesh.topology("v5e:2x2"),
    )
    entry = program.compiled.as_text().partition("\nENTRY ")[2]
    passes, _, later = entry.partition(" while(")
    unwritten = re.findall(r"= (\w+\[[\d,]*\])\S* custom-call\(\)", passes)
    assert "f32[4,32,128]" not in unwritten  # Shards of four layers.
    assert " conditional(" in later


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_results_are_those_of_a_map(first, monkeypatch):
    """In both branches of the conditional, which reads the first number."""
    early = dataclasses.replace(platform.CPU, allocates_early=True)
    monkeypatch.setattr(zero, "traced_platform", lambda: early)
    x = jnp.arange(24.0).reshape(4, 3, 2).at[0, 0, 0].set(first)
    found = jax.jit(lambda x: zero._map_layers(halves, {"x": x}))(x)["x"]
    np.testing.assert_array_equal(found, x[:, :2] / 2)


def halves(layer):
    return {path: x[:2] / 2 for path, x in layer.items()}
