"""Running state: carried along, exact over the global batch, and never trained."""

import dataclasses

import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from support import resnets
from support.marks import slow
from support.state_models import NAMES, STEPS, train
from support.tiny_models import host

from meshpar import checkpoint
from meshpar.explain.verify import verify
from meshpar.lowering.given_params import flat_params


def usual_loop(framework, params):
    """(losses, {path: array} after the last step) of a loop without meshpar."""
    nested = unflatten_dict(params, sep="/")
    if framework == "linen":
        stats = {"batch_stats": nested.pop("batch_stats")}
        losses, variables = resnets.linen_steps({"params": nested, **stats}, STEPS)
    else:
        nested["blocks"] = {int(key): x for key, x in nested["blocks"].items()}
        losses, variables = resnets.nnx_steps(nested, STEPS)
    return losses, host(flat_params(variables))


@pytest.mark.parametrize("layout", [slow("data=8"), f"fsdp=8,{NAMES}"])
def test_a_residual_network_trains_as_in_the_usual_loop(framework, layout):
    program = resnets.lower(framework, layout)
    begin = host(program.init(0).params)
    want_losses, want = usual_loop(framework, begin)
    state, losses = train(program, data=resnets.batch)
    assert losses == pytest.approx(want_losses, rel=1e-5)
    assert program.violations() == []
    found, params = host(state.params), program.model.params
    for path, param in params.items():
        moved = np.linalg.norm(want[path] - begin[path])
        error = np.linalg.norm(found[path] - want[path])
        assert moved > 0 and error < (1e-5 if param.is_state else 3e-4) * moved, path
    assert len([p for p in params.values() if p.is_state]) == 4
    # Evaluation uses the running statistics and changes nothing.
    evaluated = program.evaluate(state, resnets.batch())["loss"]
    assert abs(float(evaluated) - losses[0]) > 1e-2
    np.testing.assert_equal(host(state.params), found)


def test_state_has_no_gradient_no_optimizer_state_and_a_kind_of_its_own(framework):
    program = resnets.lower(framework, f"fsdp=8,{NAMES}")
    params = program.model.params
    stats = {path for path, param in params.items() if param.is_state}
    assert set(program.plan.gradients) == set(params) - stats
    of_optimizer = " ".join(leaf.path for leaf in program.plan.optimizer)
    assert not any(path in of_optimizer for path in stats)
    for path in stats:
        leaf = program.plan.parameters[path]
        assert (leaf.kind, leaf.reason) == ("state", "state without dim names")
        assert f"state     {path}" in str(program.plan)


@pytest.mark.slow
def test_state_continues_from_a_checkpoint_of_another_layout(tmp_path):
    layouts = ("data=8", f"fsdp=4,data=2,{NAMES}")
    first, second = (resnets.lower("linen", layout) for layout in layouts)
    state, _ = train(first, 2, resnets.batch)
    saved = checkpoint.Checkpoints(tmp_path, first.portable_state)
    saved.save(2, first.in_model_order(state), {})
    saved.close()
    opened = checkpoint.Checkpoints(tmp_path, second.portable_state)
    restored = second.as_stored(opened.restore().state)
    np.testing.assert_equal(host(restored.params), host(state.params))
    state, want = first.step(state, resnets.batch(2))
    restored, found = second.step(restored, resnets.batch(2))
    assert float(found["loss"]) == pytest.approx(float(want["loss"]), rel=1e-6)
    for path, param in first.model.params.items():
        if param.is_state:
            np.testing.assert_allclose(
                restored.params[path], state.params[path], rtol=1e-5, atol=1e-6
            )


@pytest.mark.slow
def test_verify_compares_state():
    programs = (resnets.lower("nnx", layout) for layout in ("data=2", "data=1"))
    report = verify(*programs, [resnets.batch(0), resnets.batch(1)])
    assert report.ok, report.problem
    compared = [c.tensor for c in report.comparisons if c.kind == "state"]
    assert compared.count("blocks/0/norm/mean") == 2 and len(compared) == 8


def test_verify_finds_state_that_differs():
    def skewed(params, batch, key):
        result = model.loss(params, batch, key)
        path = "blocks/1/norm/var"
        return result.with_state(result.state | {path: result.state[path] * 1.001})

    model, reference = resnets.model("nnx"), resnets.lower("nnx", "data=1")
    planted = dataclasses.replace(model, loss=skewed)
    tested = resnets.lower("nnx", "data=2", planted)
    report = verify(tested, reference, [resnets.batch()])
    first = report.first_difference
    assert (first.kind, first.tensor) == ("state", "blocks/1/norm/var")
