"""`parse_hlo`: groups in every form, loops, bytes, sources and overlap."""

import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from support.marks import slow
from support.tiny_models import lower, model

import meshpar
from meshpar.contracts import Contract, parse_hlo

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def program(body, x):
    mesh = jax.make_mesh((2, 2, 2), tuple(MESH), axis_types=(AxisType.Auto,) * 3)
    spec = PartitionSpec(tuple(MESH))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(mapped).lower(x).compile().as_text()


def test_every_set_of_axes_is_recognised():
    sets = [s for n in (1, 2, 3) for s in itertools.combinations(MESH, n)]

    def varying(x):
        missing = tuple(set(MESH) - set(jax.typeof(x).manual_axis_type.varying))
        return lax.pcast(x, missing, to="varying") if missing else x

    for axes in sets:
        text = program(lambda x, a=axes: varying(lax.psum(x, a)), jnp.ones((8, 5)))
        (collective,) = parse_hlo(text, MESH)
        size = 2 ** len(axes)
        assert (collective.kind, collective.axes) == ("all_reduce", axes)
        assert collective.payload_bytes == 20 and collective.group_size == size
        assert collective.wire_bytes == 2 * 20 * (size - 1) / size


def test_loops_multiply_and_lines_are_traced_back():
    def body(x):
        def inner(x, _):
            y = lax.psum(x, "fsdp")
            return lax.pcast(y, ("fsdp",), to="varying") / 2, None

        def outer(x, _):
            x, _ = lax.scan(inner, x, None, length=3)
            return lax.ppermute(x, "tensor", [(0, 1), (1, 0)]), None

        return lax.scan(outer, x, None, length=5)[0]

    text = program(body, jnp.ones((8, 6)))
    collectives = {c.kind: c for c in parse_hlo(text, MESH)}
    reduction, permute = collectives["all_reduce"], collectives["permute"]
    assert reduction.executions == 15 and permute.executions == 5
    assert permute.axes == ("tensor",)
    assert permute.wire_bytes == 5 * 24
    file, number = reduction.source.rsplit(":", 1)
    line = pathlib.Path(file).read_text().splitlines()[int(number) - 1]
    assert 'lax.psum(x, "fsdp")' in line


TEXT = """
ENTRY %main (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  ROOT %r = f32[4]{{0}} all-reduce(%p), channel_id=1, {groups}, to_apply=%add
}}
"""


@pytest.mark.parametrize(
    "groups, axes",
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("replica_groups=[4,2]<=[8]", ("tensor",)),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", ("fsdp",)),
        ("replica_groups={{0,1,4,5},{2,3,6,7}}", ("data", "tensor")),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ("data", "fsdp")),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", ("data",)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", ("fsdp", "tensor")),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", ("fsdp",)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", ("tensor",)),
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}",
            ("fsdp",),
        ),
        ("replica_groups={}", ("data", "fsdp", "tensor")),
    ],
)
def test_groups_in_every_form(groups, axes):
    (collective,) = parse_hlo(TEXT.format(groups=groups), MESH)
    assert collective.axes == axes and not collective.partial


PARTS = """
ENTRY %main (p: f32[8,4]) -> f32[16,4] {{
  %p = f32[8,4]{{1,0}} parameter(0)
  ROOT %all-gather.8 = f32[16,4]{{1,0}} all-gather(%p), channel_id=22, {groups}, \
dimensions={{0}}, use_global_device_ids=true, metadata={{op_name=\
"jit(step)/transpose(jvp())/dot_general" stack_frame_id=16}}
}}
"""


@pytest.mark.parametrize(
    "mesh, groups, axes",
    [
        (
            {"fsdp": 4, "tensor": 2},
            "replica_groups=[4,2]<=[2,2,2]T(2,1,0)",
            ("fsdp",),
        ),
        (
            {"fsdp": 2, "tensor": 4},
            "replica_groups=[4,2]<=[2,2,2]T(0,2,1)",
            ("tensor",),
        ),
        (
            {"fsdp": 2, "tensor": 4},
            "replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}",
            ("tensor",),
        ),
        (MESH, "replica_groups={{0,3},{1,2},{4,7},{5,6}}", ("fsdp", "tensor")),
        (
            {"data": 4, "tensor": 2},
            "replica_groups={{0,2,4},{1},{3,5,7},{6}}",
            ("data",),
        ),
    ],
)
def test_groups_that_are_parts_of_axes(mesh, groups, axes):
    """The compiler may gather over a half of an axis, and send the rest otherwise."""
    (gather,) = parse_hlo(PARTS.format(groups=groups), mesh)
    assert (gather.kind, gather.axes) == ("all_gather", axes) and gather.partial
    size = 3 if "{0,2,4}" in groups else 2
    assert gather.group_size == size
    assert gather.wire_bytes == 16 * 4 * 4 * (size - 1) / size


class Table(nnx.Module):
    """A table whose rows are found and whose scores pass two matmuls."""

    def __init__(self, rngs):
        def weight(names, *shape):
            return nnx.Param(rngs.params.normal(shape), out_sharding=names)

        self.rows = weight((None, "embed"), 64, 8)
        self.up = weight(("mlp", "embed"), 8, 64)
        self.down = weight(("embed", "mlp"), 64, 8)

    def __call__(self, tokens):
        x = jnp.tanh(self.rows[...][tokens] @ self.up[...] @ self.down[...])
        return x @ self.rows[...].T


def test_a_compiled_gather_over_a_part_of_an_axis_counts_against_the_bounds():
    batch = {name: np.zeros((64, 4), np.int32) for name in "xy"}

    def loss(table, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            table(batch["x"]), batch["y"]
        )
        return losses.mean()

    tables = meshpar.from_nnx(Table, loss)
    compiled = meshpar.lower(tables, optax.sgd(0.1), "fsdp=4,tensor=2", batch)
    parts = [c for c in compiled.collectives if c.partial]
    assert {(c.kind, c.axes, c.group_size) for c in parts} == {
        ("all_gather", ("fsdp",), 2)
    }
    assert compiled.violations() == []
    exact = [term for term in compiled.contract.terms if term.kind != "any"]
    lines = Contract(tuple(exact)).violations(compiled.collectives)
    assert any(line.startswith("all_gather over part of fsdp: ") for line in lines)


def test_text_that_cannot_be_parsed_is_an_error():
    with pytest.raises(ValueError, match="cannot read the replica groups"):
        parse_hlo(TEXT.format(groups="replica_groups=<new>"), MESH)
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse_hlo("module {}", MESH)


ASYNCHRONOUS = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}
ENTRY %main (p: bf16[4,8]) -> bf16[32,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  %g = (bf16[4,8]{1,0}, bf16[32,8]{1,0}) all-gather-start(%p), replica_groups={}
  %q = (bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[], u32[]) collective-permute-start(%p), \
source_target_pairs={{0,1},{2,3},{4,5},{6,7}}
  %e = bf16[4,8]{1,0} collective-permute-done(%q)
  ROOT %d = bf16[32,8]{1,0} all-gather-done(%g)
}
"""


SLICES = """
ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %t = token[] after-all()
  %s = (f32[4]{0}, u32[], token[]) send(%p, %t), frontend_attributes={\
_xla_host_transfer_rendezvous="a",_xla_megascale_target="{1,2}x{0:3}",\
_xla_megascale_transfer_type="ALL_REDUCE"}
  %v = (f32[4]{0}, u32[], token[]) recv(%t), frontend_attributes={\
_xla_host_transfer_rendezvous="a"}
  %d = f32[4]{0} fusion(%p), kind=kLoop, calls=%add
  %w = (f32[4]{0}, token[]) recv-done(%v)
  ROOT %r = f32[4]{0} get-tuple-element(%w), index=0
}
"""


def test_a_send_between_slices_is_a_collective():
    (collective,) = parse_hlo(SLICES, MESH)
    assert collective.kind == "all_reduce" and collective.axes == ("data",)
    assert collective.group_size == 2 and collective.payload_bytes == 16
    assert collective.asynchronous and collective.overlapped


CONDITIONAL = """
%call (p: f8e4m3[4]) -> f8e4m3[4] {
  %p = f8e4m3[4]{0} parameter(0)
  ROOT %r = f8e4m3[4]{0} all-reduce(%p), replica_groups={}, to_apply=%add
}
ENTRY %main (p: f8e4m3[4], i: s32[]) -> f8e4m3[4] {
  %p = f8e4m3[4]{0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %c = f8e4m3[4]{0} conditional(%i, %p, %p), branch_computations={%call, %call}
}
"""


def test_collectives_under_a_conditional_are_marked():
    first, second = parse_hlo(CONDITIONAL, MESH)
    assert first == second and first.conditional and first.payload_bytes == 4
    assert first.computation == "call" and first.source == ""


def test_asynchronous_pairs_count_once():
    gather, permute = parse_hlo(ASYNCHRONOUS, MESH)
    assert gather.asynchronous and gather.payload_bytes == 32 * 8 * 2
    assert permute.kind == "permute" and permute.payload_bytes == 4 * 8 * 2
    assert permute.axes == ("tensor",)


WIDENED = """
ENTRY %main (p: bf16[4]) -> f32[4] {
  %p = bf16[4]{0} parameter(0)
  ROOT %r = f32[4]{0} all-reduce(%p), replica_groups={}, to_apply=%add
}
"""


def test_an_all_reduce_that_widens_its_operand_counts_as_it_was_written():
    (collective,) = parse_hlo(WIDENED, MESH)
    assert collective.payload_bytes == 4 * 4


STARTED = """
ENTRY %main (p: bf16[4], q: f32[3]) -> bf16[4] {
  %p = bf16[4]{0} parameter(0)
  %q = f32[3]{0} parameter(1)
  %s = ((bf16[4]{0}), bf16[4]{0}) all-reduce-start(%p), replica_groups={}, to_apply=%add
  %t = ((f32[3], f32[3]), f32[3], f32[3]) all-reduce-start(%q, %q), replica_groups={}
  %b = (f32[3]{0}, f32[3]{0}) all-reduce-done(%t)
  ROOT %r = bf16[4]{0} all-reduce-done(%s)
}
"""


def test_the_start_of_an_all_reduce_on_a_gpu_counts_once():
    sizes = [collective.payload_bytes for collective in parse_hlo(STARTED, MESH)]
    assert sizes == [4 * 2, 2 * 3 * 4]


@pytest.mark.parametrize(
    "layout, payloads",
    [slow("data=8", 2.0), slow("fsdp=8,zero=1", 3.0), ("fsdp=8,zero=2", 3.0)],
)
def test_the_jit_lowering_moves_as_many_bytes_as_theory_says(layout, payloads):
    """The unit is (n-1)/n of the bytes of all parameters; scalars are left out.

    On CPUs the compiler all-reduces gradients and gathers updated parameters.
    """
    tiny = model()
    program = lower(layout, tiny, optax.sgd(0.1), lowering="jit")
    payload = 4 * sum(p.size for p in tiny.params.values()) * 7 / 8
    moved = sum(c.wire_bytes for c in program.collectives)
    np.testing.assert_allclose(moved / payload, payloads, rtol=0.01)
    assert {c.axes for c in program.collectives} == {(layout.split("=")[0],)}
    assert program.violations() == []


def test_a_loop_as_long_as_the_data_says_may_hold_no_collective():
    axes = tuple(MESH)

    def run(inside):
        def body(x):
            num = lax.psum(x[0, 0], axes).astype(int)

            def step(_, y):
                return (
                    lax.pcast(lax.psum(y, axes), axes, to="varying")
                    if inside
                    else y * y
                )

            return lax.fori_loop(0, num, step, x)

        return parse_hlo(program(body, jnp.ones((8, 5))), MESH)

    (found,) = run(inside=False)
    assert (found.kind, found.executions) == ("all_reduce", 1)
    with pytest.raises(ValueError, match="cannot read the trip count"):
        run(inside=True)
