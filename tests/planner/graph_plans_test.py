"""Plans of models without layers: their layouts train as one device does."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from support import graph_models, tiny_models
from support.graph_models import ADAM, Convolutional

import meshpar
from experiments.reports import planning
from meshpar.errors import LayoutError, MeshparError
from meshpar.planner.plans import FROM_LAYERS, SIMULATED


def losses(model, layout, batch, count):
    """Losses of three steps; `epsilon` keeps Adam from dividing by nearly zero."""
    optimizer = optax.adam(1e-2, eps=1e-2)
    devices = jax.devices()[:count]
    program = meshpar.lower(model, optimizer, layout, batch, devices=devices)
    state, found = program.init(seed=0), []
    for _ in range(3):
        state, metrics = program.step(state, batch)
        found.append(float(metrics["loss"]))
    return found


MODELS = {
    "without names": (
        lambda: meshpar.from_nnx(Convolutional, graph_models.squares),
        lambda: graph_models.squares_batch(32, 768, 8),
        "data=2,fsdp=1",
    ),
    "with names": (tiny_models.plain_model, tiny_models.batch, "data=2,zero=3,fsdp=2"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_planned_layout_trains_as_one_device_does(name):
    make_model, make_batch, wanted = MODELS[name]
    model, batch = make_model(), make_batch()
    options = dict(top=1, require=wanted)
    plans = meshpar.plan(model, ADAM, batch, jax.devices()[:8], **options)
    assert plans.method == SIMULATED and len(plans.best) == 1
    assert plans.layout.num_devices == 8
    assert plans.why_not(plans.best[0]) == ""
    assert plans.best[0].uncertainty is None
    want = losses(model, "data=1", batch, 1)
    np.testing.assert_allclose(losses(model, plans.layout, batch, 8), want, rtol=1e-4)


def test_a_plan_is_as_wanted_and_prints():
    model, batch = graph_models.mlp(16, 64, 16), graph_models.squares_batch(32, 16, 16)
    options = dict(require="tensor=2,fsdp=1", forbid="expert", top=2)
    plans = meshpar.plan(model, ADAM, batch, jax.devices()[:8], **options)
    for candidate in (*plans.fitting, *plans.too_large):
        assert candidate.layout.tensor == 2 and candidate.layout.expert == 1
    assert SIMULATED in planning.summary(plans)
    row = planning.candidate_row(plans, plans.best[0])
    assert row[0] == str(plans.layout) and "%" in row[4]
    found = planning.as_dict(plans, [])
    assert found["method"] == SIMULATED != FROM_LAYERS
    seconds = dict(found["best"][0]["seconds"])
    total = seconds.pop("total")
    assert sum(seconds.values()) == pytest.approx(total)
    slow = meshpar.plan(model, ADAM, batch, jax.devices()[:8], slowdown=3.0, **options)
    ratio = slow.best[0].seconds.total / plans.best[0].seconds.total
    assert slow.layout == plans.layout and ratio == pytest.approx(3)


def test_what_is_not_predicted_is_refused():
    model, batch = graph_models.mlp(16, 64, 16), graph_models.squares_batch(32, 16, 16)
    for item in ("microbatches=2", "pipe=2", "offload=optimizer"):
        with pytest.raises(MeshparError, match="for a model without layers a plan"):
            meshpar.plan(model, ADAM, batch, jax.devices()[:4], require=item)
    odd = meshpar.from_nnx(
        lambda rngs: nnx.Linear(15, 15, use_bias=False, rngs=rngs), graph_models.squares
    )
    batch = graph_models.squares_batch(15, 15, 15)
    with pytest.raises(LayoutError, match="no layout of 4"):
        meshpar.plan(odd, ADAM, batch, jax.devices()[:4])
