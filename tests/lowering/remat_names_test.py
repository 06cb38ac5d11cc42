"""Rematerialization by name: what a layer keeps for its backward pass."""

import jax
import optax
import pytest
from support import own_run
from support.marks import slow
from support.tiny_models import BATCH, LENGTH, batch, lower, model

import meshpar
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
    "layout, named",
    [
        slow("data=2,remat=attention", "attention"),
        ("data=2,remat=2*full+2*attention", "attention"),
        slow("data=2,remat=experts", "expert_rows"),
    ],
)
def test_a_policy_whose_values_no_layer_has_is_refused(layout, named):
    own = meshpar.from_nnx(
        lambda rngs: own_run.Net(8, 4, rngs), own_run.loss, layers="layers"
    )
    x = jax.ShapeDtypeStruct((4, 8), "float32")
    rows = {"x": x, "y": jax.ShapeDtypeStruct((4,), "float32")}
    with pytest.raises(LayoutError, match=f"names '{named}', and no layer.*remat=full"):
        meshpar.lower(own, optax.sgd(0.1), layout, rows, devices=jax.devices()[:2])
    plans = meshpar.plan(own, optax.sgd(0.1), rows, jax.devices()[:2])
    tried = {plan.layout.remat for plan in (*plans.best, *plans.others)}
    assert "full" in tried and not any("attention" in remat for remat in tried)


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
