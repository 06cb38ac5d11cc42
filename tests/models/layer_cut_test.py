"""A model that is cut at its layers trains as the whole model does on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.cut_models import CUTS, batch
from support.tiny_models import host

import meshpar

STEPS = 2
LOSS_ERROR, UPDATE_ERROR = 1e-5, 3e-4
LAYOUTS = {
    "data": "data=8",
    "remat": "fsdp=8,remat=full",
    "tensor": "fsdp=2,tensor=2,data=2,zero=2",
    "prefetch": "fsdp=2,remat=dots,microbatches=2,prefetch=kernel",
    "pipe": "pipe=2,data=2,microbatches=4",
    "saved": "pipe=2,fsdp=2,zero=3,microbatches=4,save=residuals",
    "interleaved": "pipe=2,data=2,microbatches=4,virtual_stages=2,remat=full",
    "zero_bubble": "pipe=2,data=2,microbatches=4,schedule=zb_h1",
}
DEFAULT = {
    ("nnx", "prefetch"),
}
"""Rows that run by default; `-m slow` runs all others."""


def lower(model, layout, optimizer=None, **options):
    optimizer = optimizer or optax.sgd(0.1, momentum=0.9)
    layout = meshpar.layouts.parse(layout)
    devices = jax.devices()[: layout.num_devices]
    return meshpar.lower(model, optimizer, layout, batch(), devices=devices, **options)


def train(program):
    """(initial parameters, losses, parameters) in the model's order of layers."""
    state, losses = program.init(0), []
    initial = host(program.in_model_order(state).params)
    for step in range(STEPS):
        state, metrics = program.step(state, batch(step))
        losses.append(float(metrics["loss"]))
    losses.append(float(program.evaluate(state, batch())["loss"]))
    return initial, losses, host(program.in_model_order(state).params)


@functools.cache
def plain(name):
    """Losses and {path: update} of the whole model, its layers stacked afterwards."""
    cut = CUTS[name]
    model = cut.make("")
    assert model.layered is None
    initial, losses, params = train(lower(model, "data=1"))
    stacked = cut.make(cut.layers).stack_variables
    return stacked(initial), losses, stacked(params)


def rows():
    product = [
        (name, layout)
        for name in CUTS
        for layout in LAYOUTS
        # A pattern of four layers has two rows: one for each stage.
        if not (name.endswith("pattern") and layout == "interleaved")
    ]
    assert set(product) >= DEFAULT
    for row in product:
        marks = () if row in DEFAULT else pytest.mark.slow
        yield pytest.param(*row, marks=marks, id="-".join(row))


@pytest.mark.parametrize("name, layout", list(rows()))
def test_layers_that_run_one_by_one_train_as_the_whole_model(name, layout):
    cut, layout = CUTS[name], LAYOUTS[layout]
    if name == "encoder_decoder" and "fsdp" in layout:
        layout += ",allow=bias"
    program = lower(cut.make(cut.layers), layout)
    initial, losses, params = train(program)
    want_initial, want_losses, want = plain(name)
    assert program.lowering.name == "shard_map"
    assert program.violations() == []
    np.testing.assert_allclose(losses, want_losses, rtol=LOSS_ERROR)
    assert params.keys() == want.keys()
    for path, x in want.items():
        np.testing.assert_array_equal(initial[path], want_initial[path])
        update, own = x - want_initial[path], params[path] - initial[path]
        scale = np.linalg.norm(update)
        if "frequencies" not in path:  # Constants of the layers.
            assert scale > 0, path
        assert np.linalg.norm(own - update) <= UPDATE_ERROR * scale, path


@pytest.mark.parametrize("name", ["nnx", pytest.param("linen", marks=pytest.mark.slow)])
def test_bf16_compute_stays_close(name):
    cut = CUTS[name]
    options = {"compute_dtype": jnp.bfloat16}
    _, losses, _ = train(lower(cut.make(cut.layers), "fsdp=2,remat=full", **options))
    np.testing.assert_allclose(losses, plain(name)[1], rtol=1e-2)
    assert losses[0] != plain(name)[1][0]


@pytest.mark.slow
def test_pipedream_trains_layers_with_context():
    """While weights hardly move, microbatches add up to steps of the whole batch."""
    cut, num, small = CUTS["nnx_pattern"], 4, optax.sgd(1e-3)
    layout = f"pipe=2,data=2,microbatches={num},schedule=pipedream"
    program = lower(cut.make(cut.layers), layout, optimizer=small)
    initial, losses, params = train(program)
    assert program.violations() == []
    whole = lower(cut.make(cut.layers), "data=1", optimizer=small)
    _, want_losses, want = train(whole)
    np.testing.assert_allclose(losses, want_losses, rtol=2e-3)
    for path, x in want.items():
        update, own = num * (x - initial[path]), params[path] - initial[path]
        assert np.linalg.norm(own - update) <= 0.05 * np.linalg.norm(update), path
