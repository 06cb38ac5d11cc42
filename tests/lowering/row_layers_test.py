"""Layers that split rows over `tensor`: noise, moves, replicas and refusals.

That they train the model of one device and keep their contract is in `matrix_test`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny_stack
from support.marks import slow
from support.tiny_models import batch, lower, model, plain_model

import meshpar
from meshpar.errors import LayoutError
from meshpar.jaxprs.walk import equations

WHY = "activations, between split rows and split length"


def trained(layout, of, steps=2, **options):
    program = lower(layout, of, optax.sgd(0.1), **options)
    state = program.init(0)
    for step in range(steps):
        state, metrics = program.step(state, batch(step))
    return metrics, state.params


@pytest.mark.slow
@pytest.mark.parametrize("layers", [slow("fsdp"), "1*tensor+1*fsdp"])
def test_dropout_draws_what_one_device_draws(layers):
    of = model(dropout=0.3)
    ours, params = trained(f"fsdp=2,tensor=2,layers={layers}", of)
    alone, alone_params = trained("data=1", of)
    assert float(ours["loss"]) == pytest.approx(float(alone["loss"]), rel=1e-5)
    for path, x in alone_params.items():
        np.testing.assert_allclose(params[path], x, rtol=1e-4, atol=1e-6)


def test_layers_run_on_rows_of_their_own_and_move_no_activations_inside():
    seen = []

    def layer(linear, x_BD):
        seen.append(x_BD.shape[0])
        return x_BD + jnp.tanh(linear(x_BD))

    stack = meshpar.LayerStack(
        stack="layers",
        embed=lambda net, batch: batch["x"],
        layer=layer,
        head_loss=tiny_stack.head_loss,
    )
    program = meshpar.lower(
        meshpar.from_nnx(tiny_stack.Net, stack),
        optax.sgd(0.1),
        "fsdp=2,tensor=2,layers=fsdp",
        tiny_stack.batch(),
        devices=jax.devices()[:4],
    )
    seen.clear()
    with jax.set_mesh(program.mesh):
        jaxpr = jax.make_jaxpr(program.lowering.gradients)(
            program.abstract_state, program.step_batch
        )
    assert set(seen) == {tiny_stack.BATCH // 4}
    scans = [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "scan"]
    for scan in scans:
        inside = {eqn.primitive.name for eqn in equations(scan.params["jaxpr"].jaxpr)}
        assert "all_to_all" not in inside


def test_each_change_of_uses_is_one_all_to_all_each_way():
    def declared(layers):
        program = lower(f"fsdp=2,tensor=2,layers={layers}", model(depth=4))
        terms = program.contract.terms
        return sum(term.count for term in terms if term.why.startswith(WHY))

    changes = {"tensor": 0, "fsdp": 2, "1*tensor+3*fsdp": 2}
    changes["1*fsdp+2*tensor+1*fsdp"] = 4
    for layers, number in changes.items():
        assert declared(layers) == 2 * number  # Forward, and gradients back.


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["tensor=4", "fsdp=2,tensor=4"])
def test_layers_that_split_rows_keep_their_contract(axes):
    program = lower(f"{axes},remat=dots,layers=fsdp", model(depth=4))
    assert program.violations() == []
    tensor = [t for t in program.contract.terms if t.axes == ("tensor",)]
    gathers = (t.payload_bytes for t in tensor if t.kind == "all_gather")
    found = (
        c.payload_bytes * c.executions
        for c in program.collectives
        if (c.kind, c.axes) == ("all_gather", ("tensor",))
    )
    assert sum(gathers) == sum(found) > 0


@pytest.mark.slow
def test_replicas_that_train_apart_may_split_rows():
    metrics = [
        trained(f"replica=2,fsdp=2,{rest}", model(), mode=meshpar.LocalSGD(period=2))[0]
        for rest in ("tensor=2,layers=fsdp", "tensor=2")
    ]
    assert float(metrics[0]["loss"]) == pytest.approx(float(metrics[1]["loss"]), 1e-5)


# What cannot be.


def test_a_compiler_does_not_run_such_layers():
    moves = "layers=fsdp: this moves weights.* lowering=jit .*; leave it out, or use"
    for of, lowering, words in (
        (plain_model(), "", "layers=fsdp: this needs layers"),
        (model(), "jit", f"{moves} lowering=shard_map"),
    ):
        with pytest.raises(LayoutError, match=words):
            lower("tensor=2,layers=fsdp", of, lowering=lowering)


def test_a_mix_of_uses_names_all_layers():
    words = r"layers=1\*tensor\+2\*fsdp names 3 layers, the model has 2"
    with pytest.raises(LayoutError, match=words):
        lower("tensor=2,layers=1*tensor+2*fsdp")


def changed(**changes):
    of = tiny_stack.model()
    return dataclasses.replace(of, layered=dataclasses.replace(of.layered, **changes))


def lower_stack(of):
    return meshpar.lower(
        of,
        optax.sgd(0.1),
        "tensor=2,layers=fsdp",
        tiny_stack.batch(),
        devices=jax.devices()[:2],
    )


def test_activations_hold_rows():
    def embed(params, batch, key):
        return {"x": batch["x"], "scale": jnp.ones(3)}

    of = changed(
        embed=embed,
        layer=lambda p, x, key, context: x,
        head_loss=lambda p, x, batch, key: tiny_stack.model().layered.head_loss(
            p, x["x"], batch, key
        ),
    )
    words = r"layers=fsdp splits the rows .* `embed` at \['scale'\] has no dim"
    with pytest.raises(LayoutError, match=words):
        lower_stack(of)


def test_activations_have_gradients():
    def embed(params, batch, key):
        return {"x": batch["x"], "row": jnp.arange(len(batch["x"]))}

    of = changed(
        embed=embed,
        layer=lambda p, x, key, context: x,
        head_loss=lambda p, x, batch, key: tiny_stack.model().layered.head_loss(
            p, x["x"], batch, key
        ),
    )
    with pytest.raises(LayoutError, match="layers=fsdp moves .* but it holds int32"):
        lower_stack(of)
