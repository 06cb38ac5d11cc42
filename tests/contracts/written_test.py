"""Collectives read from the jaxpr of a step: runs, bytes, axes, purposes, splits."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.marks import slow

import meshpar
from meshpar import layouts
from meshpar.contracts.purposes import gathers, purpose
from meshpar.contracts.written import written_collectives, written_terms
from meshpar.ops.tensor_parallel import column_parallel, row_parallel

WHOLE = P()
SIZES = {"data": 2, "fsdp": 2, "tensor": 2}


def read(fn, *shapes, axes=frozenset(SIZES), specs=WHOLE):
    """The collectives that a function writes inside a shard_map over some axes."""
    mesh = jax.make_mesh(
        tuple(SIZES.values()),
        tuple(SIZES),
        axis_types=(jax.sharding.AxisType.Auto,) * 3,
    )
    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=specs, out_specs=P(), axis_names=axes, check_vma=False
    )
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    with jax.set_mesh(mesh):
        return written_collectives(jax.make_jaxpr(mapped)(*args), SIZES)


def test_runs_are_the_lengths_of_scans():
    @jax.jit
    def summed(x):
        return lax.psum(x, "fsdp")

    def fn(x):
        x, _ = lax.scan(lambda x, _: (summed(summed(x)), None), x, length=3)
        return lax.fori_loop(0, 5, lambda _, x: jnp.sin(summed(x)), x)

    first, second, third = read(fn, (4, 8))
    assert (first.runs, second.runs, third.runs) == (3, 3, 5)
    assert first.payload_bytes == 4 * 4 * 8
    (term,) = written_terms([first, second, third])
    assert (term.count, term.payload_bytes, term.bound) == (11, 11 * 128, False)


def test_what_no_result_needs_is_not_written():
    def fn(x):
        _ = lax.psum(x, "data")
        unread, x = lax.scan(
            lambda c, x: (c + lax.psum(x, "fsdp"), lax.pmax(x, "tensor")), x[0], x
        )
        return x

    (found,) = read(fn, (3, 8))
    assert (found.axes, found.kind, found.runs) == (("tensor",), "all_reduce", 3)


def test_axes_are_those_of_the_mesh_from_outer_to_inner():
    def fn(x):
        return lax.psum(lax.all_gather(x, ("fsdp", "data"), tiled=True), "tensor")

    gather, total = read(fn, (2, 8))
    assert (gather.axes, gather.group_size) == (("data", "fsdp"), 4)
    assert gather.payload_bytes == 4 * 2 * 8 * 4 == total.payload_bytes


def test_groups_may_be_parts_of_an_axis():
    sizes = {"context": 8}
    mesh = jax.make_mesh((8,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))

    def fn(x):
        groups = [[0, 1], [2, 3], [4, 5], [6, 7]]
        return lax.all_to_all(x, "context", 0, 1, axis_index_groups=groups, tiled=True)

    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=P("context"), out_specs=P("context"), check_vma=False
    )
    jaxpr = jax.make_jaxpr(mapped)(jnp.ones((16, 4)))
    (found,) = written_collectives(jaxpr, sizes)
    assert found.partial and found.group_size == 2 and found.axes == ("context",)


def test_a_loop_that_does_not_say_how_often_it_runs_is_held_to_nothing():
    def fn(x):
        return lax.while_loop(
            lambda x: jnp.sum(x) < 9, lambda x: lax.psum(x, "fsdp"), x
        )

    (term,) = written_terms(read(fn, (4,)))
    assert term.bound and term.wire_bytes == float("inf")
    assert "does not say how often it runs" in term.why


def test_all_branches_count_as_in_the_text_of_a_program():
    def fn(x):
        return lax.cond(x[0] > 0, lambda x: lax.psum(x, "fsdp"), lambda x: x, x)

    (found,) = read(fn, (4,))
    assert found.runs == 1 and not found.may_drop


def test_equal_collectives_may_run_once():
    def fn(x):
        return lax.psum(x, "fsdp") + jnp.sin(lax.psum(x, "fsdp"))

    first, second = read(fn, (4,))
    assert not first.may_drop and second.may_drop


@pytest.mark.parametrize(
    ("specs", "equal"), [([P("data"), P("data")], True), ([P("data"), P()], False)]
)
def test_equal_collectives_of_two_shard_maps_may_run_once(specs, equal):
    """A backward pass computes what it needs in a shard_map of its own."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax.jit
    def doubled(x):
        return 2 * x

    def fn(x):
        maps = (
            jax.shard_map(
                lambda x: lax.psum(doubled(x), "data"),
                mesh=mesh,
                in_specs=spec,
                out_specs=P(),
                check_vma=False,
            )
            for spec in specs
        )
        return [mapped(x) for mapped in maps]

    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct((4, 8), jnp.float32))
    found = written_collectives(jaxpr, {"data": 2})
    assert [x.may_drop for x in found] == [False, equal]


def test_equal_collectives_of_loops_of_one_round_may_run_once():
    def fn(x):
        def summed(_, i):
            index = jnp.zeros_like(i), i
            return None, lax.psum(lax.dynamic_slice(x, index, (4, 4)), "data")

        def rounds(*numbers):
            return lax.scan(summed, None, jnp.array(numbers))[1]

        return rounds(0), rounds(4), rounds(0, 4)

    assert [x.may_drop for x in read(fn, (4, 8))] == [False, False, False]

    def whole(x):
        return fn(x[:, :4])

    assert [x.may_drop for x in read(whole, (4, 8))] == [False, True, True]


def test_what_does_not_change_in_a_loop_may_leave_it():
    def fn(x):
        def body(total, x):
            return total + lax.psum(x, "fsdp") * lax.psum(3.0, "fsdp"), None

        return lax.scan(body, jnp.zeros(8), x)[0] + 0 * lax.psum(x[0, 0], "data")

    def invariant(x):
        def body(total, _):
            return total + lax.psum(x[0], "fsdp"), None

        return lax.scan(body, jnp.zeros(8), None, length=4)[0]

    assert [found.may_drop for found in read(fn, (3, 8))] == [False, False]
    assert [found.may_drop for found in read(invariant, (3, 8))] == [True]


def test_purposes_say_which_way_they_go():
    @jax.checkpoint
    def layer(x):
        with purpose("rows", "backward"):
            return jnp.sin(lax.psum_scatter(jnp.sin(x), "fsdp", tiled=True))

    def fn(x):
        with purpose("weights"), gathers():
            x = lax.ppermute(x, "data", [(0, 1), (1, 0)])
        return jax.grad(lambda x: jnp.sum(layer(x)))(x)

    found = {(x.kind, x.why, x.may_drop, x.backward) for x in read(fn, (8, 8))}
    assert found == {
        ("permute", "weights", True, False),
        ("reduce_scatter", "rows, again", True, True),
        ("all_gather", "rows, backward", True, True),
    }


def test_automatic_axes_split_what_the_code_says_they_split():
    split = P(None, "tensor")

    def constrained(x):
        x = lax.with_sharding_constraint(x, split)
        x, _ = lax.scan(lambda x, _: (2 * x, None), x, length=2)
        return lax.psum(x.reshape(2, 4, 8), "fsdp")

    def mapped(x):
        specs = dict(in_specs=split, out_specs=split, axis_names={"tensor"})
        return lax.psum(jax.shard_map(jnp.sin, **specs)(x) + x, "fsdp")

    def free(x):
        return lax.psum(x @ x, "fsdp"), lax.psum(jnp.stack([jnp.sum(x)]), "fsdp")

    manual = {"data", "fsdp"}
    for fn in (constrained, mapped):
        (found,) = read(fn, (8, 8), axes=manual)
        assert found.payload_bytes == 4 * 8 * 8 // 2 and not found.whole
    unknown, vector = read(free, (8, 8), axes=manual, specs=WHOLE)
    assert unknown.payload_bytes == 4 * 8 * 8 and unknown.whole == ("tensor",)
    assert not vector.whole
    bound, exact = written_terms([unknown, vector])
    assert bound.bound and bound.why.startswith("at most") and not exact.bound


def test_a_constraint_that_leaves_dims_to_the_compiler_says_nothing_of_them():
    free, split = P(P.UNCONSTRAINED, P.UNCONSTRAINED), P(None, "tensor")

    def after_a_split(x):
        x = lax.with_sharding_constraint(x, split)
        return lax.psum(lax.with_sharding_constraint(x, free), "fsdp")

    def in_part(x):
        part = P(None, P.UNCONSTRAINED)
        return lax.psum(lax.with_sharding_constraint(x, part), "fsdp")

    (found,) = read(after_a_split, (8, 8), axes={"data", "fsdp"})
    assert found.payload_bytes == 4 * 8 * 8 // 2 and not found.whole
    (found,) = read(in_part, (8, 8), axes={"data", "fsdp"})
    assert found.payload_bytes == 4 * 8 * 8 and found.whole == ("tensor",)


# Layers that call functions in ways that a compiled program alone can tell.


def plain(x, up, down):
    (y,) = column_parallel(x, (up, ("embed", "mlp")))
    y = row_parallel(nn.silu(y), down, ("mlp", "embed"))
    return layouts.constrain(x + y, "batch", "residual_length", "embed")


@jax.custom_vjp
def with_vjp(x, up, down):
    return plain(x, up, down)


with_vjp.defvjp(
    lambda *args: (plain(*args), args),
    lambda args, dy: jax.vjp(plain, *args)[1](dy),
)


def looped(x, up, down):
    return lax.scan(lambda x, _: (plain(x, up, down), None), x, length=3)[0]


def over_two(x, up, down):
    both = jnp.stack([up, up]), jnp.stack([down, down])
    return lax.scan(lambda x, w: (plain(x, *w), None), x, both)[0]


def counted(x, up, down):
    return lax.fori_loop(0, 2, lambda _, x: plain(x, up, down), x)


def of_two(x, up, down):
    ys = jax.vmap(plain, in_axes=(0, None, None))(jnp.stack([x, 2 * x]), up, down)
    return jnp.sum(ys, axis=0)


@jax.jit
def jitted(x, up, down):
    return plain(x, up, down)


FORMS = {
    "plain": (plain, 1),
    "jit": (jitted, 1),
    "custom_vjp": (with_vjp, None),
    "scan": (looped, 3),
    "scan over weights": (over_two, 2),
    "fori_loop": (counted, 2),
    "vmap": (of_two, 2),
    "checkpoint": (jax.checkpoint(plain), None),
}


def lower(mlp, layout="fsdp=4,tensor=2"):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            def weight(name, *shape, dims):
                init = nn.with_logical_partitioning(
                    nn.initializers.lecun_normal(), dims
                )
                return self.param(name, init, shape)

            for i in range(2):
                up = weight(f"up{i}", 16, 32, dims=("embed", "mlp"))
                down = weight(f"down{i}", 32, 16, dims=("mlp", "embed"))
                x = mlp(x, up, down)
            return x

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(3):
                x = Layer(name=f"layer_{i}")(x)
            return x

    x = np.random.default_rng(0).normal(size=(16, 8, 16)).astype(np.float32)
    model = meshpar.from_linen(
        Stack(),
        lambda f, b: jnp.square(f(b["x"]) - b["y"]).mean(),
        x[:1],
        layers="layer_*",
    )
    return meshpar.lower(model, optax.adam(1e-3), layout, {"x": x, "y": np.sin(x)})


@pytest.mark.parametrize(
    "form",
    [
        "jit",
        *(slow(form) for form in FORMS if form != "jit"),
    ],
)
def test_however_a_layer_calls_a_function_its_moves_are_declared_exactly(form):
    mlp, times = FORMS[form]
    program = lower(mlp)
    assert program.violations() == []
    tensor = [t for t in program.contract.terms if t.axes == ("tensor",)]
    for kind in ("all_gather", "reduce_scatter"):
        exact = sum(t.payload_bytes for t in tensor if t.kind == kind and not t.bound)
        found = sum(
            c.payload_bytes * c.executions
            for c in program.collectives
            if c.axes == ("tensor",) and c.kind == kind
        )
        if times is None:  # A compiler merges some of what runs again.
            assert 0 < found <= exact
        else:
            assert found == exact
            # Two calls a layer, each with one way in and one out, and back.
            moves = {"all_gather": 3, "reduce_scatter": 2}[kind]
            assert exact == moves * times * 2 * 3 * (16 // 4) * 8 * 16 * 4
