"""Frozen parameters: no gradient, no optimizer state, no traffic of gradients."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from support import adapted_model as adapted
from support import resnets
from support.marks import slow
from support.tiny_models import host

import meshpar

LORA = r"lora_[ab]$"
ADAM = optax.adam(1e-2, eps=1e-2)


def trained_paths(model):
    return {path for path, param in model.params.items() if param.trained}


def assert_trains_its_own(program, steps=3):
    """Trains; frozen variables stay bit for bit, and all others move. The losses."""
    begin = host(program.init(0).params)
    state, losses = adapted.train(program, steps)
    for path, x in host(state.params).items():
        moved = (x != begin[path]).any()
        assert moved == program.model.params[path].trained, path
        assert x.dtype == begin[path].dtype
    assert program.violations() == []
    return state, losses


@pytest.mark.parametrize(
    "layout, options",
    [
        ("data=4", {}),
        slow("fsdp=4,zero=2,microbatches=2", {}),
        slow("fsdp=4,zero=3", {}),
        slow("fsdp=4", {"lowering": "jit"}),
        slow("data=2,fsdp=2,tensor=2", {}),
        slow("pipe=2,fsdp=2,zero=3,microbatches=4", {}),
    ],
)
def test_adapters_train_as_in_a_plain_loop(layout, options):
    want, module = adapted.train_plainly(ADAM, nnx.LoRAParam)
    program = adapted.lower(layout, optimizer=ADAM, **options)
    state, losses = assert_trains_its_own(program)
    assert losses == pytest.approx(want, rel=1e-5)
    found = program.model.bind(program.in_model_order(state).params)
    for tested, reference in zip(
        jax.tree.leaves(nnx.state(found, nnx.LoRAParam)),
        jax.tree.leaves(nnx.state(module, nnx.LoRAParam)),
        strict=True,
    ):
        np.testing.assert_allclose(tested, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_gradients_and_optimizer_state_are_those_of_the_trained_alone():
    program = adapted.lower("fsdp=4,zero=3")
    trained = trained_paths(program.model)
    assert len(trained) == 4
    assert set(program.gradients(program.init(0), adapted.rows())[1]) == trained
    moments = program.init(0).optimizer_state[0].mu
    assert set(moments) == trained == set(program.plan.gradients)
    sizes = program.plan.bytes_per_device()
    mine = sum(program.plan.parameters[path].bytes_per_device for path in trained)
    assert sizes["gradients"] == mine
    assert sizes["optimizer"] == 2 * mine + 4
    whole = adapted.lower("fsdp=4,zero=3", adapted.model(""))
    memory, more = (p.lowering.memory(adapted.rows()) for p in (program, whole))
    assert memory.gradients == mine < more.gradients
    assert memory.activations < more.activations and memory.working < more.working
    kinds = {path: leaf.kind for path, leaf in program.plan.parameters.items()}
    assert kinds["blocks/up/lora_a"] == "parameter"
    assert kinds["blocks/quantized"] == kinds["head/kernel"] == "frozen"
    assert "frozen    head/kernel" in str(program.plan)


@pytest.mark.parametrize("zero", [slow(1), slow(2), 3])
def test_no_gradient_of_a_frozen_parameter_is_sent(zero):
    """Exactly: those that fsdp splits are scattered, the others all-reduced."""
    program = adapted.lower(f"fsdp=4,zero={zero}")
    leaves = program.plan.parameters
    split = {path for path in trained_paths(program.model) if any(leaves[path].spec)}
    whole = trained_paths(program.model) - split
    assert split and whole
    for kind, paths in (("reduce_scatter", split), ("all_reduce", whole)):
        declared = [t for t in program.contract.terms if t.kind == kind and not t.bound]
        sizes = [t.payload_bytes for t in declared if "gradients" in t.why]
        assert sum(sizes) == sum(4 * program.model.params[path].size for path in paths)
    assert program.violations() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, trained",
    [
        slow("fsdp=4,zero=1", "head"),
        slow("fsdp=4,zero=2,microbatches=2", "norm|head"),
        ("fsdp=4,zero=3", "head"),
        slow("fsdp=4,zero=3", "embed"),
        slow("pipe=2,microbatches=4", "head"),
    ],
)
def test_parts_outside_the_layers_may_train_alone(layout, trained):
    want, _ = adapted.train_plainly(ADAM, trained)
    program = adapted.lower(layout, adapted.model(trained), ADAM)
    _, losses = assert_trains_its_own(program)
    assert losses == pytest.approx(want, rel=1e-5)
    if "zero=3" in layout:
        gathers = [t.why for t in program.contract.terms if t.kind == "all_gather"]
        backward = [why for why in gathers if "backward" in why]
        assert bool(backward) == (trained != "head"), gathers
        written = program.lowered.as_text().count("stablehlo.all_gather")
        assert (written == 3) == (trained == "head")  # One shared, two of a layer.


def test_a_path_selects_what_a_filter_selects():
    by_path, by_filter = adapted.model(LORA), adapted.model()
    assert by_path.params == by_filter.params
    assert trained_paths(by_path) == {
        f"blocks/{where}/lora_{which}" for where in ("up", "down") for which in "ab"
    }


@pytest.mark.slow
def test_replicas_average_the_trained_parameters_alone():
    mode = meshpar.LocalSGD(period=1)
    program = adapted.lower("replica=2,fsdp=2", optimizer=optax.sgd(0.1), mode=mode)
    state, losses = assert_trains_its_own(program, 2)
    want, _ = adapted.train_plainly(optax.sgd(0.1), nnx.LoRAParam, 2)
    assert losses == pytest.approx(want, rel=1e-5)
    floats = sum(program.model.params[p].size for p in trained_paths(program.model))
    assert program.step(state, adapted.rows())[1]["replica_bytes"] <= 2 * 4 * floats


@pytest.mark.slow
def test_compute_dtype_casts_frozen_weights_but_not_integers():
    program = adapted.lower("fsdp=2", compute_dtype=jax.numpy.bfloat16)
    kinds = {path: str(leaf.dtype) for path, leaf in program.plan.weights.items()}
    assert kinds["head/kernel"] == kinds["blocks/up/lora_a"] == "bfloat16"
    assert kinds["blocks/quantized"] == "int8"
    assert_trains_its_own(program, 1)


@pytest.mark.parametrize(
    "trained, words",
    [
        ("nothing", "no parameter of the model is trained.*head/kernel"),
        ("quantized", "no parameter of the model is trained"),
        ("blocks/1/", "layer 1 differs from layer 0.*or trained parameters"),
        (nnx.Not(nnx.LoRAParam), "selects 'count', a Variable; only an nnx.Param"),
    ],
)
def test_what_cannot_be_trained_is_refused(trained, words):
    class Counting(adapted.Net):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.count = nnx.Variable(jax.numpy.zeros(()))

    with pytest.raises(ValueError, match=words):
        meshpar.from_nnx(Counting, adapted.loss, layers="blocks", trained=trained)


def test_linen_parameters_are_frozen_by_path():
    model = meshpar.from_linen(
        resnets.LinenResNet(),
        resnets.linen_loss,
        jax.ShapeDtypeStruct((1, 4, 4, 8), "float32"),
        resnets.linen_evaluation,
        trained="Dense",
    )
    program = resnets.lower("linen", "data=2", model)
    begin = host(program.init(0).params)
    state, _ = program.step(program.init(0), resnets.batch())
    for path, param in model.params.items():
        moved = (np.asarray(state.params[path]) != begin[path]).any()
        assert moved == (param.trained or param.is_state), path
