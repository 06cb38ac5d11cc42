"""`lower` with options, models and batches; matrix_test tries the layouts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import tiny_stack
from support.equality import start
from support.marks import slow
from support.tiny_models import batch, config, host, lower, model, relative_error

import meshpar
from meshpar import layouts
from meshpar.errors import LayoutError


@functools.cache
def cached_model(framework):
    sizes = {"kv_heads": 4} if framework == "nnx" else {}
    return model(framework, **sizes)


@functools.cache
def gradients_of_one_device():
    program = lower("data=1", cached_model("nnx"))
    return host(program.gradients(start(program), batch())[1])


@pytest.mark.parametrize("remat", [slow("dots"), "full"])
def test_rematerialization_runs_the_forward_matmuls_again(remat):
    assert dots(f"fsdp=2,remat={remat}") > dots("fsdp=2")


@functools.cache
def dots(layout):
    program = lower(layout, cached_model("nnx"))
    return program.lowered.as_text().count("stablehlo.dot_general")


@pytest.mark.slow
def test_bfloat16_compute_over_float32_master_weights():
    program = lower("fsdp=2,tensor=2", cached_model("nnx"), compute_dtype=jnp.bfloat16)
    state = start(program)
    metrics, gradients = program.gradients(state, batch())
    assert all(x.dtype == jnp.float32 for x in state.params.values())
    assert all(g.dtype == jnp.float32 for g in gradients.values())
    assert "bf16" in program.lowered.as_text()
    error = relative_error(host(gradients), gradients_of_one_device())
    assert 1e-4 < error < 3e-2


@pytest.mark.slow
def test_clipping_bounds_the_update_and_reports_the_norm_before():
    free = lower("fsdp=2", cached_model("nnx"), optax.sgd(1.0))
    clipped = lower("fsdp=2", cached_model("nnx"), optax.sgd(1.0), clip_norm=0.25)
    before = host(start(free).params)
    moved = {}
    for name, program in (("free", free), ("clipped", clipped)):
        state, metrics = program.step(start(program), batch())
        after = host(state.params)
        moved[name] = float(optax.tree.norm({k: after[k] - before[k] for k in before}))
        assert float(metrics["grad_norm"]) == pytest.approx(moved["free"], rel=1e-4)
    assert moved["free"] > 0.5
    assert moved["clipped"] == pytest.approx(0.25, rel=1e-4)


@pytest.mark.slow
def test_dropout_does_not_depend_on_the_mesh(framework):
    dropping = model(framework, dropout=0.5)
    alone, split = (
        lower(layout, dropping) for layout in ("data=1", "data=2,fsdp=2,tensor=2")
    )
    kept, split_kept = (
        float(program.evaluate(start(program), batch())["loss"])
        for program in (alone, split)
    )
    one, many = (
        float(program.step(start(program), batch())[1]["loss"])
        for program in (alone, split)
    )
    assert many == pytest.approx(one, rel=1e-5)
    assert split_kept == pytest.approx(kept, rel=1e-5)
    assert abs(one - kept) > 1e-3  # Evaluation drops nothing.


def test_microbatches_weigh_by_their_weight():
    """A masked mean over uneven microbatches equals the whole batch's."""

    class Line(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.ones((4,)), out_sharding=("embed",))

    def loss(module, batch):
        error = batch["mask"] * (batch["x"] @ module.w[...] - batch["y"]) ** 2
        count = batch["mask"].sum()
        return error.sum() / count, {"weight": count, "error": error.sum() / count}

    rng = np.random.default_rng(0)
    data = {
        "x": rng.normal(size=(8, 4)).astype(np.float32),
        "y": rng.normal(size=8).astype(np.float32),
        "mask": np.array([1, 0, 1, 1, 1, 1, 1, 0], np.float32),
    }
    line, found = meshpar.from_nnx(Line, loss), []
    for text in ("data=1", "fsdp=2,microbatches=4"):
        layout = layouts.parse(text)
        devices = jax.devices()[: layout.num_devices]
        program = meshpar.lower(line, optax.sgd(0.1), layout, data, devices=devices)
        metrics, gradients = program.gradients(program.init(0), data)
        found.append((host(metrics), host(gradients)))
    (one, one_gradients), (many, many_gradients) = found
    np.testing.assert_allclose(many_gradients["w"], one_gradients["w"], rtol=1e-5)
    for name in ("loss", "error", "weight"):
        np.testing.assert_allclose(many[name], one[name], rtol=1e-5)


def test_step_donates_and_counts():
    program = tiny_stack.lower("fsdp=2")
    state = program.init(3)
    old = state.params["head"]
    state, metrics = program.step(state, program.place_batch(tiny_stack.batch()))
    assert int(state.step) == 1 and int(state.seed) == 3
    assert old.is_deleted()
    assert set(metrics) == {"loss", "grad_norm", "weight"}


def test_fingerprint_tells_programs_apart():
    one = tiny_stack.lower("data=2")
    assert one.fingerprint == tiny_stack.lower("data=2").fingerprint
    assert one.fingerprint != tiny_stack.lower("fsdp=2").fingerprint


@pytest.mark.slow
def test_equality_holds_for_the_default_sizes_at_initialization():
    """Larger tensors take other vectorized code paths: still bitwise the same."""
    sizes = dict(vocab=256, embed=96, mlp=160, heads=4, kv_heads=2)
    wide = config(**sizes).make_model()
    initial = [
        host(lower(layout, wide).init(7).params)
        for layout in ("data=1", "data=2,fsdp=2,tensor=2", "fsdp=8")
    ]
    for path, value in initial[0].items():
        for other in initial[1:]:
            np.testing.assert_array_equal(other[path], value, err_msg=path)


@pytest.mark.parametrize(
    "layout, options, words",
    [
        ("data=3", {}, ["batch=16 does not divide"]),
        ("fsdp=2,activations.heds=none", {}, ["activations.heds", "'heads'"]),
        ("data=2", {"clip_norm": 0.0}, ["clip_norm=0.0"]),
        ("fsdp=5,allow=idle_devices", {}, ["batch=16"]),
        ("data=2", {"mode": "local_sgd"}, ["'local_sgd'", "known: LocalSGD"]),
    ],
)
def test_lowering_errors(layout, options, words):
    with pytest.raises(ValueError) as error:
        lower(layout, cached_model("nnx"), **options)
    for word in words:
        assert word in str(error.value)


def test_remat_without_a_place_for_it_is_an_error():
    class Line(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.ones((4,)), out_sharding=("embed",))

    line = meshpar.from_nnx(Line, lambda m, b: (b["x"] @ m.w[...]).mean())
    data = {"x": np.ones((8, 4), np.float32)}
    with pytest.raises(LayoutError, match="remat=full.*layouts.remat"):
        meshpar.lower(line, optax.sgd(1), "data=8,remat=full", data)


@pytest.mark.parametrize(
    "wrong, words",
    [
        slow({"tokens": np.zeros((16, 15), np.int32)}, r"int32\[16, 15\].*\[16, 16\]"),
        ({"tokens": np.zeros((16, 16), np.float32)}, "float32"),
    ],
)
def test_a_batch_of_another_shape_is_an_error(wrong, words):
    program = lower("data=2", cached_model("nnx"))
    with pytest.raises(ValueError, match=words):
        program.place_batch(batch() | wrong)


@pytest.mark.parametrize(
    "data, words",
    [
        ({}, "the batch is empty"),
        ({"x": np.zeros((8, 2)), "y": np.zeros(4)}, "same leading batch dim"),
        ({"x": np.float32(1)}, "the batch is empty"),
    ],
)
def test_lowering_refuses_batches_without_a_common_dim(data, words):
    with pytest.raises(ValueError, match=words):
        meshpar.lower(cached_model("nnx"), optax.sgd(1), "data=8", data)
