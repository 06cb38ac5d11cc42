"""Rematerialization by name: what a layer keeps for its backward pass."""

import jax
import optax
import pytest
from support.tiny_models import BATCH, LENGTH, batch, lower, model

from meshpar.errors import LayoutError


def saved(layout):
    """Bytes that all layers keep on one device, as predicted."""
    program = lower(layout, model(kv_heads=4), optax.sgd(0.1))
    abstract = jax.eval_shape(batch)
    return program.lowering.memory(abstract).activations


def test_a_layer_keeps_its_input_and_what_is_named():
    depth, rows, embed, mlp, item = 2, BATCH // 2 * LENGTH, 32, 64, 4
    full = saved("fsdp=2,remat=full")
    both = saved("fsdp=2,remat=names:attention+mlp_hidden")
    assert saved("fsdp=2,remat=names:attention") - full == depth * rows * embed * item
    assert both - full == depth * rows * (embed + mlp) * item
    assert both < saved("fsdp=2,remat=none")


@pytest.mark.parametrize(
    "remat, words",
    [
        ("names:", "remat='names:' .*names:NAME"),
        ("names:attention+", "remat="),
        ("named", "known: attention, dots, experts, full"),
        ("names:attentoin", "no value the name 'attentoin' .*did you mean 'attention'"),
    ],
)
def test_names_that_are_none_are_errors(remat, words):
    with pytest.raises(LayoutError, match=words):
        lower(f"fsdp=2,remat={remat}", model(), optax.sgd(0.1))
