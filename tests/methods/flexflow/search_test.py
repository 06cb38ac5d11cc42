"""FlexFlow's search: layouts that it finds train as one device does."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from support import graph_models, tiny_models, tiny_stack
from support.graph_models import ADAM, Convolutional

import meshpar
from meshpar.errors import LayoutError, MeshparError
from meshpar.methods import flexflow


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


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_layout_that_was_found_trains_as_one_device_does(name):
    make_model, make_batch, wanted = MODELS[name]
    model, batch = make_model(), make_batch()
    found = flexflow.search(model, ADAM, batch, jax.devices()[:8], require=wanted)
    assert found.layout == found.fitting[0].layout and found.layout.num_devices == 8
    want = losses(model, "data=1", batch, 1)
    np.testing.assert_allclose(losses(model, found.layout, batch, 8), want, rtol=1e-4)


def test_a_search_finds_what_is_wanted():
    model, batch = graph_models.mlp(16, 64, 16), graph_models.squares_batch(32, 16, 16)
    options = dict(require="tensor=2,fsdp=1", forbid="expert")
    found = flexflow.search(model, ADAM, batch, jax.devices()[:8], **options)
    for proposal in (*found.fitting, *found.too_large):
        assert proposal.layout.tensor == 2 and proposal.layout.expert == 1
    best = found.fitting[0].seconds
    assert sum(best.by_term.values()) == pytest.approx(best.total)
    slow = flexflow.search(
        model, ADAM, batch, jax.devices()[:8], slowdown=3.0, **options
    )
    ratio = slow.fitting[0].seconds.total / best.total
    assert slow.layout == found.layout and ratio == pytest.approx(3)


def test_what_is_not_predicted_is_refused():
    model, batch = graph_models.mlp(16, 64, 16), graph_models.squares_batch(32, 16, 16)
    for item in ("microbatches=2", "pipe=2", "offload=optimizer"):
        with pytest.raises(MeshparError, match="this search predicts"):
            flexflow.search(model, ADAM, batch, jax.devices()[:4], require=item)
    odd = meshpar.from_nnx(
        lambda rngs: nnx.Linear(15, 15, use_bias=False, rngs=rngs), graph_models.squares
    )
    batch = graph_models.squares_batch(15, 15, 15)
    with pytest.raises(LayoutError, match="no layout of 4"):
        flexflow.search(odd, ADAM, batch, jax.devices()[:4])
    layered = tiny_stack.model(), ADAM, tiny_stack.batch()
    with pytest.raises(MeshparError, match="is for models without layers"):
        flexflow.search(*layered, jax.devices()[:4])
