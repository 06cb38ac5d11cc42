"""Plans: the sharding of each leaf, and every error of a layout that does not fit."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from meshpar import layouts
from meshpar.arrays import abstract
from meshpar.errors import LayoutError
from meshpar.layouts.param import Param
from meshpar.layouts.resolve import make_plan

PARAMS = {
    "mlp/up": Param((3, 8, 16), jnp.float32, ("layers", "embed", "mlp")),
    "norm": Param((8,), jnp.float32, ("embed",)),
    "head": Param((8, 32), jnp.float32, ("embed", "vocab")),
}


def resolve(text, params=None, optimizer=None):
    params = params or PARAMS
    state = jax.eval_shape((optimizer or optax.adam(1e-3)).init, abstract(params))
    return make_plan(layouts.parse(text), params, state)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_level_decides_the_sharded_state(zero):
    plan = resolve(f"fsdp=4,tensor=2,zero={zero}")
    whole, shard = P(None, None, "tensor"), P(None, "fsdp", "tensor")
    assert plan.specs["mlp/up"] == shard
    assert plan.weights["mlp/up"].partition_spec == (shard if zero == 3 else whole)
    assert plan.gradients["mlp/up"].partition_spec == (shard if zero >= 2 else whole)
    assert plan.optimizer_specs[0].mu["mlp/up"] == shard
    assert plan.optimizer_specs[0].count == P()
    # The norm's 8 elements stay whole over tensor.
    over_tensor = 4 * ((3 * 8 * 16 + 8 * 32) // 2 + 8)
    both = 4 * ((3 * 8 * 16 + 8 * 32) // 8 + 8 // 4)
    assert plan.bytes_per_device() == {
        "parameters": both,
        "optimizer": 2 * both + 4,
        "weights": both if zero == 3 else over_tensor,
        "gradients": both if zero >= 2 else over_tensor,
        "synchronization": 0,
    }


@pytest.mark.parametrize("zero", [2, 3])
def test_weights_outside_of_mixtures_may_be_sharded_over_expert_too(zero):
    """An expert's own weights have `expert` on the dim of the experts alone."""
    names = ("layers", "expert", "embed", "mlp")
    experts = Param((3, 4, 8, 16), jnp.float32, names)
    params = PARAMS | {"experts/up": experts}
    plan = resolve(f"fsdp=2,expert=4,zero={zero},params.embed=fsdp+expert", params)
    assert plan.specs["mlp/up"] == P(None, ("fsdp", "expert"), None)
    assert plan.specs["experts/up"] == P(None, "expert", "fsdp", None)
    reason = plan.parameters["experts/up"].reason
    assert "embed->fsdp (expert splits its own dim)" in reason
    held = plan.weights["experts/up"].held
    assert held == ((), ("expert",), (), ())
    assert not any(plan.weights["mlp/up"].held)
    weights = {path: leaf.partition_spec for path, leaf in plan.weights.items()}
    if zero == 3:
        assert weights == plan.specs
    else:
        assert weights["mlp/up"] == P(None, None, None)
        assert weights["experts/up"] == P(None, "expert", None, None)
        assert "whole over fsdp*expert: zero=2" in plan.weights["mlp/up"].reason


@pytest.mark.parametrize(
    "layout, gigabytes",
    [
        ("data=64", 120),
        ("fsdp=64,zero=1", 31.4),
        ("fsdp=64,zero=2", 16.6),
        ("fsdp=64,zero=3", 1.9),
    ],
)
def test_state_of_7_5_billion_parameters_is_as_in_the_zero_paper(layout, gigabytes):
    """16 bytes per parameter in mixed precision, over 64 devices.

    Weights and gradients in the compute dtype take 2 bytes each; float32 master
    weights and Adam's two moments take 12. The numbers are those of Figure 1.
    """
    params = {"w": Param((1_171_875, 6400), jnp.float32, (None, "embed"))}
    state = jax.eval_shape(optax.adam(1e-3).init, abstract(params))
    plan = make_plan(layouts.parse(layout), params, state, jnp.bfloat16)
    size = plan.bytes_per_device()
    count = 4  # Adam's step counter.
    n = 64 if "fsdp" in layout else 1
    zero = int(layout[-1]) if n > 1 else 0
    phi = 7_500_000_000
    assert size["parameters"] + size["optimizer"] == 12 * phi // n + count
    assert size["weights"] == 2 * phi // (n if zero == 3 else 1)
    assert size["gradients"] == 2 * phi // (n if zero >= 2 else 1)
    assert round(sum(size.values()) / 1e9, 1) == gigabytes


def test_plan_gives_reasons_and_bytes():
    plan = resolve("fsdp=4,tensor=2,min_shard_size=100")
    norm = plan.parameters["norm"]
    assert norm.partition_spec == P(None) and norm.bytes_per_device == 32
    assert "8 < min_shard_size=100" in norm.reason
    assert "embed->fsdp" in plan.parameters["head"].reason
    text = str(plan)
    assert "mlp/up" in text and "layers->whole, embed->fsdp, mlp->tensor" in text


def test_factored_optimizer_state_follows_its_parameter():
    plan = resolve("fsdp=4,tensor=2", optimizer=optax.adafactor(1e-3, 4))
    leaves = {leaf.path: leaf for leaf in plan.optimizer}
    row = next(v for k, v in leaves.items() if "v_row" in k and "head" in k)
    column = next(v for k, v in leaves.items() if "v_col" in k and "head" in k)
    assert {row.spec, column.spec} == {(("fsdp",),), (("tensor",),)}
    assert row.shape != column.shape
    assert "head (8, 32): less one dim" in row.reason
    scalar = next(leaf for leaf in plan.optimizer if not leaf.shape)
    assert scalar.spec == () and scalar.reason == "no parameter's: whole"


def test_gradients_of_several_steps_are_split_as_their_parameter():
    plan = resolve("fsdp=4,tensor=2", optimizer=optax.lbfgs(linesearch=None))
    memory = next(x for x in plan.optimizer if "memory['head']" in x.path)
    assert memory.shape == (10, 8, 32)
    assert memory.spec == ((), ("fsdp",), ("tensor",))
    assert "head (8, 32): with dims in front" in memory.reason


def unnamed(shape=(8, 16)):
    return {**PARAMS, "free/w": Param(shape, jnp.float32, None)}


@pytest.mark.parametrize(
    "text, params, words",
    [
        (
            "fsdp=3",
            None,
            ["mlp/up", "dim 1 (embed=8) does not divide over fsdp=3", "allow="],
        ),
        ("tensor=2", unnamed(), ["free/w (8, 16): its dims have no names", "paths."]),
        (
            "fsdp=5,allow=.*[^w]$",
            {"w": Param((512, 129), jnp.float32, None)} | PARAMS,
            ["w (512, 129): its dims have no names, and none divides over fsdp=5"],
        ),
        (
            "fsdp=2,params.vocabb=fsdp",
            None,
            ["params.vocabb matches no dim", "'vocab'"],
        ),
        ("fsdp=2,paths.nothing=embed", None, ["'nothing' matches no unnamed"]),
        ("fsdp=2,allow=norm", None, ["allowance 'norm' allows nothing"]),
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
def test_layouts_that_do_not_fit_are_errors(text, params, words):
    with pytest.raises(LayoutError) as error:
        resolve(text, params)
    for word in words:
        assert word in str(error.value)


def test_all_problems_are_reported_at_once():
    with pytest.raises(LayoutError) as error:
        resolve("fsdp=3,params.nothing=fsdp", unnamed())
    problems = str(error.value).splitlines()[1:]
    assert len(problems) == 4
    for words in ("mlp/up", "does not divide", "params.nothing", "shards no parameter"):
        assert any(words in problem for problem in problems), words


def test_one_line_says_all_of_one_problem():
    many = {f"layer_{i}/w": Param((8, 16), jnp.float32, None) for i in range(20)}
    with pytest.raises(LayoutError) as error:
        resolve("tensor=2", many | PARAMS)
    (line,) = (x for x in str(error.value).splitlines() if "no names" in x)
    assert line.startswith("  layer_0/w (8, 16), layer_1/w (8, 16), layer_2/w (8, 16) ")
    assert "and 17 more: its dims" in line
    *_, last = str(error.value).splitlines()
    assert resolve(last.removeprefix("This layout fits: "), many | PARAMS).parameters[
        "layer_7/w"
    ]


@pytest.mark.parametrize("more", [(), ("big_scale",)])
def test_a_layout_that_fits_can_be_pasted_between_quotes_of_a_shell(more):
    names = "norm/scale", "positions", *more
    params = PARAMS | {name: Param((8,), jnp.float32, None) for name in names}
    with pytest.raises(LayoutError) as error:
        resolve("tensor=2", params)
    fits = str(error.value).partition("This layout fits: ")[2]
    resolve(fits, params)
    if not more:
        assert fits == "tensor=2,allow=positions$,allow=scale$"


def test_fsdp_needs_no_names():
    free = {
        "w": Param((6, 16, 8), jnp.float32, None),
        "stack/w": Param((32, 3, 8), jnp.float32, None, is_stacked=True),
        "scale": Param((3,), jnp.float32, None),
        "named": Param((8, 16), jnp.float32, (None, "mlp")),
    }
    plan = resolve("fsdp=4,zero=2", free)
    assert plan.parameters["w"].spec == ((), ("fsdp",), ())
    assert plan.parameters["stack/w"].spec == ((), (), ("fsdp",))
    assert plan.parameters["scale"].spec == ((),)
    assert "no dim divides over fsdp=4" in plan.parameters["scale"].reason
    assert plan.parameters["named"].spec == ((), ())
    assert plan.weights["w"].spec == ((), (), ())
    assert "its largest dim" in plan.parameters["w"].reason
    staged = resolve("pipe=2,fsdp=4", free)
    assert staged.parameters["stack/w"].spec == (("pipe",), (), ("fsdp",))
    kept = resolve("fsdp=4,allow=stack", free)
    assert kept.parameters["stack/w"].spec == ((), (), ())


def test_allowances_and_path_rules():
    plan = resolve(
        "fsdp=3,allow=.", PARAMS | {"x": Param((9,), jnp.float32, ("embed",))}
    )
    assert plan.parameters["head"].partition_spec == P(None, None)
    assert "does not divide over 3, allowed" in plan.parameters["head"].reason
    assert resolve("fsdp=2,allow=free", unnamed()).parameters["free/w"].spec == ((), ())
    named = resolve("fsdp=2,paths.free=embed/none", unnamed())
    assert named.parameters["free/w"].partition_spec == P("fsdp", None)
    for text in ("data=8", "pipe=3"):
        free = resolve(text, unnamed()).parameters["free/w"]
        assert free.spec == ((), ()) and free.reason == "no axis shards it"


def test_mesh_axis_names_are_dim_names_too():
    params = {"w": Param((8, 16), jnp.float32, ("fsdp", "tensor"))}
    plan = resolve("fsdp=4,tensor=2", params)
    assert plan.parameters["w"].partition_spec == P("fsdp", "tensor")


def test_several_axes_on_one_dim():
    params = {"w": Param((8, 16), jnp.float32, (("embed", "mlp"), None))}
    plan = resolve("fsdp=4,tensor=2", params)
    assert plan.parameters["w"].partition_spec == P(("fsdp", "tensor"), None)
    assert plan.parameters["w"].bytes_per_device == 8 * 16 * 4 // 8


def test_plans_share_their_sums_while_their_leaves_are_the_same():
    plan = resolve("fsdp=4,microbatches=1")
    sizes = plan.bytes_per_device()
    other = plan.of_layout(layouts.parse("fsdp=4,microbatches=4"))
    assert other.layout.microbatches == 4 and other.bytes_per_device() is sizes
    leaves = plan.parameters
    moved = {p: dataclasses.replace(leaf, on_host=True) for p, leaf in leaves.items()}
    offloaded = dataclasses.replace(other, parameters=moved)
    assert not any(other.host_bytes().values())
    assert offloaded.host_bytes()["parameters"] == sizes["parameters"]
