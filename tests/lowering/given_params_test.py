"""Parameters of a user's own: any form, any layout, and errors that name them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, traverse_util
from support import adapted_model as adapted
from support import resnets
from support.marks import first, slow
from support.tiny_models import host

import meshpar
from meshpar import checkpoint
from meshpar.errors import CheckpointError, MeshparError

SGD = optax.sgd(0.1)


def whole():
    """{path of the module: array} from another seed than that of the programs."""
    return host(adapted.model(layers="").init(jax.random.key(7)))


def nested(flat):
    return traverse_util.unflatten_dict(flat, sep="/")


def module(flat):
    return adapted.model(layers="").bind(flat)


def variables():
    """The variables of a Linen module, boxed as `init` makes them."""
    image = resnets.batch()["image"]
    return jax.jit(resnets.LinenResNet().init)(jax.random.key(7), image)


def assert_starts_there(program, given):
    """The layers stand in the stored order; in that of the model they are as given."""
    state = program.in_model_order(program.init(params=given))
    want = whole()
    for path, x in host(state.params).items():
        if path.startswith("blocks/"):
            rest = path.removeprefix("blocks/")
            rows = [want[f"blocks/{i}/{rest}"] for i in range(adapted.DEPTH)]
            np.testing.assert_array_equal(x, np.stack(rows), err_msg=path)
        else:
            np.testing.assert_array_equal(x, want[path], err_msg=path)


FORMS = {
    "nested": nested,
    "nnx module": module,
    "nnx state": lambda flat: nnx.state(module(flat)),
    "pure dict": lambda flat: nnx.to_pure_dict(nnx.state(module(flat))),
    "flat": lambda flat: flat,
    "device arrays": lambda flat: jax.tree.map(jnp.asarray, nested(flat)),
}


@pytest.mark.parametrize("form", first(4, FORMS))
def test_every_form_of_parameters_is_taken(form):
    assert_starts_there(adapted.lower("fsdp=2", optimizer=SGD), FORMS[form](whole()))


def test_a_pipeline_with_padding_takes_the_parameters_of_the_module():
    layout = "pipe=2,microbatches=2,partition=3/1"
    assert_starts_there(adapted.lower(layout, optimizer=SGD), nested(whole()))


def test_the_models_own_paths_are_taken():
    program = adapted.lower("fsdp=2", optimizer=SGD)
    stacked = host(program.model.stack_variables(whole()))
    assert_starts_there(program, stacked)


def test_every_replica_starts_with_the_given_parameters():
    mode = meshpar.LocalSGD(period=2)
    program = adapted.lower("replica=2,fsdp=2", optimizer=SGD, mode=mode)
    state = program.init(params=whole())
    for x in state.params["head/kernel"]:
        np.testing.assert_array_equal(x, whole()["head/kernel"])
    assert program.step(state, adapted.rows())[1]["loss"] > 0


def test_linen_variables_are_taken_with_and_without_their_state():
    program, boxed = resnets.lower("linen", "fsdp=8,allow=scale|bias"), variables()
    unboxed = nn.meta.unbox(boxed)
    stats = jax.tree.map(lambda x: x + 3, unboxed["batch_stats"])
    for given, mean in (
        (boxed, 0.0),
        (unboxed, 0.0),
        (unboxed["params"], 0.0),
        ({"params": unboxed["params"], "batch_stats": stats}, 3.0),
    ):
        params = host(program.init(params=given).params)
        kernel = unboxed["params"]["Dense_0"]["kernel"]
        np.testing.assert_array_equal(params["Dense_0/kernel"], kernel)
        found = params["batch_stats/LinenBlock_0/BatchNorm_0/mean"]
        np.testing.assert_array_equal(found, np.full(resnets.WIDTH, mean, np.float32))


def test_the_users_arrays_outlive_the_steps():
    """A step donates its state: the state must not hold the arrays themselves."""
    program = adapted.lower("fsdp=2", optimizer=SGD)
    own = dict(program.init(3).params)
    before = host(own)
    state = program.init(params=own)
    for number in range(2):
        state, _ = program.step(state, adapted.rows(number))
    for path, x in own.items():
        np.testing.assert_array_equal(x, before[path])


def test_floating_point_numbers_change_their_width_and_nothing_else():
    program = adapted.lower("fsdp=2", optimizer=SGD)
    wide = {
        p: np.float64(x) if x.dtype == np.float32 else x for p, x in whole().items()
    }
    assert_starts_there(program, wide)
    wide["blocks/0/quantized"] = np.float32(wide["blocks/0/quantized"])
    with pytest.raises(
        MeshparError, match="blocks/quantized is given as float32.*int8"
    ):
        program.init(params=wide)


def without(path):
    return {p: x for p, x in whole().items() if p != path}


@pytest.mark.parametrize(
    "given, words",
    [
        (lambda: without("head/kernel"), "lack head/kernel; give every parameter"),
        (lambda: without("blocks/1/up/lora_a"), "do not stack.*up/lora_a"),
        (lambda: whole() | {"heda/kernel": np.ones(3)}, "heda/kernel: no param.*head"),
        (lambda: whole() | {"head/kernel": np.ones((8, 4))}, r"\[8, 4\].*\[8, 8\]"),
        (dict, "lack blocks/down/base_module/kernel, .* and 5 more"),
    ],
)
def test_parameters_that_do_not_fit_are_errors(given, words):
    program = adapted.lower("fsdp=2", optimizer=SGD)
    with pytest.raises(MeshparError, match=words):
        program.init(params=given())


# Weights from the checkpoint of another trainer.


def save(folder, tree):
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder, tree)


@pytest.mark.parametrize(
    "tree, at",
    [
        slow(lambda: {"step": np.int32(3), "params": nested(whole())}, "params"),
        slow(lambda: {"state": {"weights": whole()}}, "state/weights"),
        slow(lambda: nested(whole()), ""),
        (lambda: {"params": nnx.state(module(whole()))}, "params"),
    ],
    ids=["nested", "flat", "all", "nnx"],
)
def test_weights_are_read_from_an_orbax_checkpoint(tmp_path, tree, at):
    save(tmp_path / "theirs", tree())
    for layout in ("fsdp=2", "pipe=2,microbatches=2,partition=3/1"):
        program = adapted.lower(layout, optimizer=SGD)
        weights = checkpoint.read_weights(tmp_path / "theirs", program, at)
        assert_starts_there(program, weights)


def test_weights_go_straight_to_their_shards(tmp_path):
    given = nn.meta.unbox(variables())["params"]
    save(tmp_path / "theirs", {"params": given, "optimizer": {"count": np.int32(1)}})
    program = resnets.lower("linen", "fsdp=8,allow=scale|bias")
    weights = checkpoint.read_weights(tmp_path / "theirs", program)
    kernel = weights["Dense_0"]["kernel"]
    assert kernel.sharding == program.abstract_params["Dense_0/kernel"].sharding
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(1, 8)}
    state = program.init(params=weights)
    np.testing.assert_array_equal(
        state.params["Dense_0/kernel"], given["Dense_0"]["kernel"]
    )


def test_a_checkpoint_without_such_weights_is_an_error(tmp_path):
    program = adapted.lower("fsdp=2", optimizer=SGD)
    save(tmp_path / "theirs", {"weights": nested(whole())})
    with pytest.raises(CheckpointError, match="nothing at 'params', but weights"):
        checkpoint.read_weights(tmp_path / "theirs", program)
    with pytest.raises(CheckpointError, match="no orbax checkpoint"):
        checkpoint.read_weights(tmp_path / "nowhere", program)
