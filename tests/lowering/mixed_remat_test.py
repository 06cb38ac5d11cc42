"""Programs whose layers have policies of rematerialization of their own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny_stack
from support.tiny_models import batch, lower, model, plain_model

import meshpar
from meshpar import layouts
from meshpar.errors import LayoutError
from meshpar.generation.layouts import generation_layouts
from meshpar.jaxprs.walk import equations
from meshpar.layouts.scope import current_scope
from meshpar.models.model_scope import model_scope

SEEN: list[str] = []


def noted(linear, x_BD):
    """A layer that notes the policy under which it is traced."""
    if (scope := current_scope()) is not None:
        SEEN.append(scope.layout.remat)
    return x_BD + jnp.tanh(linear(x_BD))


def noting_model(layer=noted, **changes):
    stack = meshpar.LayerStack(
        stack="layers",
        embed=lambda net, batch: batch["x"],
        layer=layer,
        head_loss=tiny_stack.head_loss,
    )
    stack = dataclasses.replace(stack, **changes)
    return meshpar.from_nnx(tiny_stack.Net, stack)


def lower_noting(layout, of=None, lowering=""):
    return meshpar.lower(
        of or noting_model(),
        optax.sgd(0.1),
        layout,
        tiny_stack.batch(),
        devices=jax.devices()[: layouts.parse(layout).num_devices],
        lowering=lowering,
    )


@pytest.mark.parametrize("lowering", ["shard_map", "jit"])
def test_layers_are_traced_under_their_own_policy_in_the_order_of_the_model(lowering):
    program = lower_noting("fsdp=2,remat=1*full+3*none", lowering=lowering)
    SEEN.clear()
    with jax.set_mesh(program.mesh), model_scope(program.layout, program.mesh):
        jaxpr = jax.make_jaxpr(program.lowering.gradients)(
            program.abstract_state, program.step_batch
        )
    assert list(dict.fromkeys(SEEN)) == ["full", "none"]
    scans = [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "scan"]
    forward = [eqn.params for eqn in scans if not eqn.params["reverse"]]
    alone = [] if lowering == "shard_map" else [1]  # One layer needs no loop.
    assert [scan["length"] for scan in forward] == [*alone, 3]
    back = [eqn.params["length"] for eqn in scans if eqn.params["reverse"]]
    assert back == [3, *alone]


def test_a_segment_of_one_layer_shares_nothing_with_its_backward_pass():
    """Its loop of one round is written out, and a barrier keeps the two apart."""
    one, two = (
        tiny_stack.lower(f"fsdp=2,remat={remat}")
        for remat in ("1*full+3*none", "2*full+2*none")
    )
    barriers = [p.lowered.as_text().count("optimization_barrier") for p in (one, two)]
    assert barriers[0] == barriers[1] + 1
    assert one.violations() == []


@pytest.mark.slow
def test_what_tensor_moves_again_is_declared_for_the_layers_that_do():
    def runs(remat):
        program = lower(f"fsdp=2,tensor=4,remat={remat}", model(depth=4))
        why = "activations out of row-parallel matmuls, again"
        return sum(term.count for term in program.contract.terms if term.why == why)

    # Of both sublayers the first: no gradient reads what the last one gives.
    found = [runs(remat) for remat in ("full", "1*full+1*dots+2*none", "dots", "none")]
    assert found == [4, 1, 0, 0]


def predicted(remat):
    """Bytes that all layers keep on one device."""
    program = lower(f"fsdp=2,remat={remat}", model(depth=5), optax.sgd(0.1))
    return program.lowering.memory(jax.eval_shape(batch)).activations


@pytest.mark.slow
def test_predicted_activations_are_the_sum_over_the_layers():
    full, none, dots = map(predicted, ("full", "none", "dots"))
    assert full < dots < none
    mix = (full + 3 * none + dots) / 5
    assert 0 <= predicted("1*full+3*none+1*dots") - mix < 5


def test_a_mix_evaluates_and_generates_as_one_policy_does():
    program = tiny_stack.lower("fsdp=2,remat=1*full+3*none")
    alone = tiny_stack.lower("data=1")
    losses = [
        p.evaluate(p.init(0), tiny_stack.batch())["loss"] for p in (program, alone)
    ]
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-6)
    mixed, uniform = (
        generation_layouts(layouts.parse(text), 8)
        for text in ("fsdp=2,remat=1*full+3*none", "fsdp=2")
    )
    assert mixed == uniform


@pytest.mark.parametrize("lowering", ["shard_map", "jit"])
@pytest.mark.parametrize(
    "remat, named", [("1*full+2*none", 3), ("3*full+2*none", 5)], ids=["few", "many"]
)
def test_a_mix_names_all_layers(remat, named, lowering):
    with pytest.raises(LayoutError) as error:
        tiny_stack.lower(f"fsdp=2,remat={remat}", lowering)
    assert f"remat={remat} names {named} layers, the model has 4;" in str(error.value)
    assert "add up to 4" in str(error.value)


def test_a_mix_counts_runs_of_a_pattern():
    of = noting_model()
    layered = dataclasses.replace(of.layered, pattern=3)
    of = dataclasses.replace(of, layered=layered)
    words = "names 3 runs of its pattern of 3 layers, the model has 4"
    with pytest.raises(LayoutError, match=words):
        lower_noting("fsdp=2,remat=1*full+2*none", of)


def test_a_mix_needs_layers():
    words = r"remat=1\*full\+1\*none: this needs layers, and the model has no"
    with pytest.raises(LayoutError, match=words):
        lower("fsdp=2,remat=1*full+1*none", plain_model())


def test_a_mix_needs_marks_inside_the_layers():
    """`layouts.remat` inside a layer has its policy; outside there is none."""

    def marked(linear, x_BD):
        return layouts.remat(lambda x_BD: x_BD + jnp.tanh(linear(x_BD)))(x_BD)

    def marked_head(net, x_BD, batch):
        return layouts.remat(tiny_stack.head_loss)(net, x_BD, batch)

    def gradients(layout, of):
        program = lower_noting(layout, of)
        grads = program.gradients(program.init(0), tiny_stack.batch())[1]
        return jax.tree.map(np.asarray, grads)

    got, want = (
        gradients(layout, noting_model(marked))
        for layout in ("fsdp=2,remat=1*full+3*none", "data=1")
    )
    for path, expected in want.items():
        np.testing.assert_allclose(got[path], expected, rtol=1e-5, atol=1e-7)
    with pytest.raises(LayoutError, match="layouts.remat outside the layers"):
        lower_noting("fsdp=2,remat=1*full+3*none", noting_model(head_loss=marked_head))
