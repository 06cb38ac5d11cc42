"""Running state: carried along, exact over the global batch, and never trained."""

import flax.linen as nn
import flax.linen.partitioning as partitioning
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from support import resnets
from support.tiny_models import host

import meshpar
from meshpar import checkpoint
from meshpar.errors import LayoutError
from meshpar.explain.verify import verify
from meshpar.lowering.given_params import flat_params

WIDTH, ROWS, STEPS = 8, 16, 5
NAMES = "allow=scale|bias"


def rows(seed=0):
    x = np.random.default_rng(seed).normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x + 1, "y": np.sin(x)}


def lower(model, layout, **options):
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    options = {"optimizer": optax.sgd(0.1, momentum=0.9), "devices": devices} | options
    return meshpar.lower(model, layout=layout, batch=rows(), **options)


def train(program, steps=STEPS, data=rows):
    state, losses = program.init(0), []
    for number in range(steps):
        state, metrics = program.step(state, data(number))
        losses.append(float(metrics["loss"]))
    return state, losses


# A network with BatchNorm, against the usual loops of Flax.


def usual_loop(framework, params):
    """(losses, {path: array} after the last step) of a loop without meshpar."""
    if framework == "linen":
        params = dict(params)
        stats = {p: params.pop(p) for p in list(params) if p.startswith("batch_stats/")}
        nested = {"params": {}, "batch_stats": {}}
        for path, x in [*params.items(), *stats.items()]:
            *above, last = path.split("/")
            inner = nested if path in stats else nested["params"]
            for key in above:
                inner = inner.setdefault(key, {})
            inner[last] = jnp.asarray(x)
        losses, variables = resnets.linen_steps(nested, STEPS)
        return losses, host(flat_params(variables))
    module = resnets.NnxResNet(nnx.Rngs(0))
    flat = flatten_dict(nnx.to_pure_dict(nnx.state(module)))
    nnx.update(module, {k: params["/".join(map(str, k))] for k in flat})
    losses = resnets.nnx_steps(module, STEPS)
    return losses, host(flat_params(module))


@pytest.mark.parametrize("layout", ["data=8", f"fsdp=8,{NAMES}"])
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


def test_state_continues_from_a_checkpoint_of_another_layout(tmp_path):
    layouts = ("data=8", f"fsdp=4,data=2,{NAMES}")
    first, second = (resnets.lower("linen", layout) for layout in layouts)
    state, _ = train(first, 2, resnets.batch)
    with checkpoint.Checkpoints(tmp_path, first) as saved:
        saved.save(state)
    with checkpoint.Checkpoints(tmp_path, second) as saved:
        restored = saved.restore()
    np.testing.assert_equal(host(restored.params), host(state.params))
    state, want = first.step(state, resnets.batch(2))
    restored, found = second.step(restored, resnets.batch(2))
    assert float(found["loss"]) == pytest.approx(float(want["loss"]), rel=1e-6)
    for path, param in first.model.params.items():
        if param.is_state:
            np.testing.assert_allclose(
                restored.params[path], state.params[path], rtol=1e-5, atol=1e-6
            )


def test_verify_compares_state():
    programs = (resnets.lower("nnx", layout) for layout in ("data=2", "data=1"))
    report = verify(*programs, [resnets.batch(0), resnets.batch(1)])
    assert report.ok, report.problem
    compared = [c.tensor for c in report.comparisons if c.kind == "state"]
    assert compared.count("blocks/0/norm/mean") == 2 and len(compared) == 8


def test_verify_finds_state_that_differs(monkeypatch):
    tested, reference = (resnets.lower("nnx", layout) for layout in ("data=2", "data=1"))
    model = tested.model

    def skewed(params, batch, key):
        result = model.loss(params, batch, key)
        path = "blocks/1/norm/var"
        return result.with_state(result.state | {path: result.state[path] * 1.01})

    monkeypatch.setattr(type(tested.lowering.model), "__call__", None, raising=False)
    object.__setattr__(model, "loss", skewed)
