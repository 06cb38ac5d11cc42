"""Leaves of a batch without rows: steps equal those of a plain loop of the module."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from support import plain_optax, whole_leaves
from support.marks import slow
from support.tiny_models import relative_error
from support.whole_leaves import ROWS, marked, plain_batch

import meshpar
from meshpar.errors import LayoutError, MeshparError
from meshpar.multihost import agree

STEPS = 3
TENSOR = "paths.block.*/up/kernel=embed/mlp,allow=.*"


def total_loss(model, batch):
    mean, _ = whole_leaves.loss(model, batch)
    return mean.total / mean.weight


@functools.cache
def plain_loop(kind):
    """(losses, parameters at the end) of plain optax on one device."""
    if kind == "nnx":
        graph, start = whole_leaves.nnx_start()

        def loss(params, batch):
            return total_loss(nnx.merge(graph, params), batch)
    else:
        start, module = whole_leaves.linen_start(), whole_leaves.LinenTagger()

        def loss(params, batch):
            apply = functools.partial(module.apply, {"params": params})
            return total_loss(apply, batch)

    batches = [plain_batch(i) for i in range(STEPS)]
    losses, end = plain_optax.losses(loss, start, optax.adam(1e-2), batches)
    return losses, start, end, jax.jit(loss)


@functools.cache
def lowered(kind, layout, lowering=""):
    layers = {"nnx": "blocks", "linen": "block_*"}[kind]
    named = {} if lowering else {"layers": layers}
    model = getattr(whole_leaves, f"{kind}_model")(**named)
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    batch, adam = marked(plain_batch(0)), optax.adam(1e-2)
    return meshpar.lower(model, adam, layout, batch, devices=devices, lowering=lowering)


def flat(kind, params):
    state = nnx.to_pure_dict(params) if kind == "nnx" else params
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {"/".join(str(k.key) for k in keys): np.asarray(x) for keys, x in leaves}


@pytest.mark.parametrize(
    "kind, layout, lowering",
    [
        slow("nnx", "data=2,fsdp=2", ""),
        slow("linen", f"fsdp=2,tensor=2,microbatches=4,{TENSOR}", ""),
        slow("nnx", "pipe=2,data=2,microbatches=4", ""),
        slow("linen", "fsdp=2,context=2", ""),
        ("nnx", "data=2,microbatches=2", "jit"),
        slow("linen", "pipe=2,fsdp=2,microbatches=4,save=residuals", ""),
        slow("nnx", "pipe=2,context=2,microbatches=2", ""),
        slow("linen", "data=2,fsdp=2", "shard_map"),
        slow("nnx", f"data=2,tensor=2,layers=fsdp,{TENSOR}", ""),
        slow("nnx", "pipe=2,microbatches=4,schedule=zb_h1", ""),
    ],
)
def test_steps_equal_a_plain_loop(kind, layout, lowering):
    losses, start, end, of = plain_loop(kind)
    program = lowered(kind, layout, lowering)
    params = nnx.to_pure_dict(start) if kind == "nnx" else start
    state, found = program.init(params=params), []
    for number in range(STEPS):
        state, metrics = program.step(state, marked(plain_batch(number)))
        found.append(float(metrics["loss"]))
        assert metrics["step"] == number
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    weights = {path: np.asarray(x) for path, x in program.weights(state).items()}
    assert relative_error(weights, flat(kind, end)) < 1e-4
    assert program.violations() == []
    for rows in (ROWS, 5):
        batch = plain_batch(7, rows)
        value = program.evaluate(state, marked(batch))["loss"]
        assert float(value) == pytest.approx(float(of(end, batch)), rel=1e-4)


def test_a_predictor_takes_scalars_too():
    program = lowered("nnx", "data=2,fsdp=2")
    batch = plain_batch(0)

    def fn(model, batch):
        return model(batch["tokens"], batch["scale"]) / batch["temperature"]

    state = program.init(0)
    own = marked(batch)
    found = program.predictor(fn)(state.params, own)
    model = program.model.bind(jax.device_get(state.params))
    np.testing.assert_allclose(found, nnx.jit(fn)(model, batch), rtol=1e-5, atol=1e-5)


def test_an_array_without_a_mark_has_rows():
    """It is refused by its shape, or because the loss does not take it row by row."""
    one = plain_batch(0)
    with pytest.raises(LayoutError, match="the loss is no .* over rows.*each part"):
        meshpar.lower(
            whole_leaves.nnx_model(layers="blocks"),
            optax.sgd(0.1),
            "data=8",
            marked(one) | {"class_weights": one["class_weights"]},
        )
    odd = marked(one) | {"more": np.ones(3)}
    with pytest.raises(MeshparError, match=r"\(3,\).*meshpar.Replicated\(array\) for"):
        meshpar.lower(whole_leaves.nnx_model(), optax.sgd(0.1), "data=8", odd)


def test_an_array_with_rows_is_not_replicated():
    one = marked(plain_batch(0))
    one["labels"] = meshpar.Replicated(one["labels"])
    with pytest.raises(LayoutError, match="the loss"):
        meshpar.lower(
            whole_leaves.nnx_model(layers="blocks"), optax.sgd(0.1), "data=8", one
        )
    with pytest.raises(MeshparError, match="the batch is empty"):
        whole = {"x": meshpar.Replicated(np.ones(3)), "y": np.float32(1)}
        meshpar.lower(whole_leaves.nnx_model(), optax.sgd(0.1), "data=8", whole)


@pytest.mark.parametrize(
    "change, words",
    [
        (
            lambda b: {"scale": b["scale"].value},
            r"batch\['scale'\] has rows, .* lowered for a meshpar.Replicated",
        ),
        (
            lambda b: {"tokens": meshpar.Replicated(b["tokens"])},
            r"batch\['tokens'\] has a meshpar.Replicated, .* lowered for rows",
        ),
        (
            lambda b: {"scale": meshpar.Replicated(np.ones(3, np.float32))},
            r"batch leaf float32\[3\]: the program was lowered for float32\[8\]",
        ),
        (
            lambda b: {"temperature": np.ones(16, np.float32)},
            r"float32\[16\]: the program was lowered for float32\[\]",
        ),
    ],
)
def test_batches_have_the_form_of_the_first(change, words):
    program, batch = lowered("nnx", "data=2,fsdp=2"), marked(plain_batch(0))
    with pytest.raises(MeshparError, match=words):
        program.place_batch(batch | change(batch))


def test_processes_compare_their_values(monkeypatch):
    program, seen = lowered("nnx", "data=2,fsdp=2"), []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(agree, "check_fingerprint", seen.append)
    for number in range(3):
        program.batches.as_arrays(marked(plain_batch(number)))
        program.batches._compare(marked(plain_batch(number)))
    (fields,) = seen  # Of the first batch alone.
    assert fields["batch['temperature']"] == "float32[] 1.0"
    assert {*fields} == {
        *("batch['class_weights'].value", "batch['scale'].value"),
        *("batch['step']", "batch['temperature']"),
    }
