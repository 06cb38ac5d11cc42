"""Strict resolution: what each leaf gets, and every way in which it can fail."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from meshpar import layouts
from meshpar.flax_models import Param
from meshpar.layouts import LayoutError
from meshpar.plan import make_plan

PARAMS = {
    "mlp/up": Param((3, 8, 16), jnp.float32, ("layers", "embed", "mlp")),
    "norm": Param((8,), jnp.float32, ("embed",)),
    "head": Param((8, 32), jnp.float32, ("embed", "vocab")),
}


def plan(text, params=None, optimizer=None):
    params = params or PARAMS
    abstract = {k: jax.ShapeDtypeStruct(p.shape, p.dtype) for k, p in params.items()}
    state = jax.eval_shape((optimizer or optax.adam(1e-3)).init, abstract)
    return make_plan(layouts.parse(text), params, state)


@pytest.mark.parametrize(
    "zero, parameter, gradient",
    [
        (1, P(None, None, "tensor"), P(None, None, "tensor")),
        (2, P(None, None, "tensor"), P(None, "fsdp", "tensor")),
        (3, P(None, "fsdp", "tensor"), P(None, "fsdp", "tensor")),
    ],
)
def test_zero_says_what_is_sharded(zero, parameter, gradient):
    made = plan(f"fsdp=4,tensor=2,zero={zero}")
    assert made.parameters["mlp/up"].partition_spec == parameter
    assert made.gradients["mlp/up"].partition_spec == gradient
    assert made.optimizer_specs[0].mu["mlp/up"] == P(None, "fsdp", "tensor")
    assert made.optimizer_specs[0].count == P()
    state = 3 * 8 * 16 + 8 + 8 * 32
    ways = {"parameters": zero == 3, "gradients": zero >= 2}
    for kind, sharded in ways.items():
        over_tensor = (3 * 8 * 16 + 8 * 32) // 2 + 8
        want = state * 4 // 8 + (8 - 4) // 1 if sharded else over_tensor * 4
        # The norm is whole over tensor: 8 / 4 elements of 4 bytes.
        want = (3 * 8 * 16 + 8 * 32) * 4 // 8 + 8 if sharded else want
        assert made.bytes_per_device()[kind] == want


def test_plan_tells_reasons_and_bytes():
    made = plan("fsdp=4,tensor=2,min_shard_size=100")
    norm = made.parameters["norm"]
    assert norm.partition_spec == P(None) and norm.bytes_per_device == 32
    assert "8 < min_shard_size=100" in norm.reason
    assert "embed->fsdp" in made.parameters["head"].reason
    text = str(made)
    assert "mlp/up" in text and "layers->whole, embed->fsdp, mlp->tensor" in text


def test_factored_optimizer_state_follows_its_parameter():
    made = plan("fsdp=4,tensor=2", optimizer=optax.adafactor(1e-3, 4))
    leaves = {leaf.path: leaf for leaf in made.optimizer}
    row = next(v for k, v in leaves.items() if "v_row" in k and "head" in k)
    column = next(v for k, v in leaves.items() if "v_col" in k and "head" in k)
    assert {row.spec, column.spec} == {(("fsdp",),), (("tensor",),)}
    assert row.shape != column.shape


def unnamed(shape=(8, 16)):
    return {**PARAMS, "free/w": Param(shape, jnp.float32, None)}


@pytest.mark.parametrize(
    "text, params, words",
    [
        (
            "fsdp=3",
            None,
            ["mlp/up", "dim 1 (embed=8) does not divide over fsdp=3", "waive="],
        ),
        ("fsdp=2", unnamed(), ["free/w (8, 16): nobody named its dims", "paths."]),
        (
            "fsdp=2,params.vocabb=fsdp",
            None,
            ["params.vocabb matches no dim", "'vocab'"],
        ),
        ("fsdp=2,paths.nothing=embed", None, ["'nothing' matches no unnamed"]),
        ("fsdp=2,waive=norm", None, ["waiver 'norm' waives nothing"]),
        (
            "fsdp=2,params.vocab=fsdp",
            None,
            ["head {0: 'embed', 1: 'vocab'}: two dims on axis 'fsdp'"],
        ),
        ("tensor=2,params.mlp=none,params.vocab=none", None, ["tensor=2 shards no"]),
        ("fsdp=2,min_shard_size=999", None, ["fsdp=2 shards no", "min_shard_size"]),
        ("fsdp=2,paths.free=embed", unnamed(), ["1 names ('embed',) for 2 dims"]),
        (
            "fsdp=2",
            {"w": Param((8,), jnp.float32, ("embedd",))},
            ["no rule for dim 'embedd'", "did you mean 'embed'"],
        ),
    ],
)
def test_what_cannot_be_honoured_is_an_error(text, params, words):
    with pytest.raises(LayoutError) as error:
        plan(text, params)
    for word in words:
        assert word in str(error.value)


def test_all_problems_are_reported_at_once():
    with pytest.raises(LayoutError) as error:
        plan("fsdp=3,params.nothing=fsdp", unnamed())
    assert len(str(error.value).splitlines()) > 5


def test_waivers_and_path_rules():
    made = plan("fsdp=3,waive=.", PARAMS | {"x": Param((9,), jnp.float32, ("embed",))})
    assert made.parameters["head"].partition_spec == P(None, None)
    assert "does not divide over 3, waived" in made.parameters["head"].reason
    assert plan("fsdp=2,waive=free", unnamed()).parameters["free/w"].spec == ((), ())
    named = plan("fsdp=2,paths.free=embed/none", unnamed())
    assert named.parameters["free/w"].partition_spec == P("fsdp", None)
    assert plan("data=8", unnamed()).parameters["free/w"].spec == ((), ())


def test_mesh_axis_names_are_dim_names_too():
    params = {"w": Param((8, 16), jnp.float32, ("fsdp", "tensor"))}
    made = plan("fsdp=4,tensor=2", params)
    assert made.parameters["w"].partition_spec == P("fsdp", "tensor")


def test_several_axes_on_one_dim():
    params = {"w": Param((8, 16), jnp.float32, (("embed", "mlp"), None))}
    made = plan("fsdp=4,tensor=2", params)
    assert made.parameters["w"].partition_spec == P(("fsdp", "tensor"), None)
    assert made.parameters["w"].bytes_per_device == 8 * 16 * 4 // 8
