"""The reader of compiled programs: groups in every form, loops, bytes, sources."""

import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from support.tiny_models import lower, model

from meshpar.contracts import hlo

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
        (one,) = hlo.parse_hlo(text, MESH)
        assert (one.kind, one.axes) == ("all_reduce", axes)
        assert one.payload_bytes == 20 and one.group_size == 2 ** len(axes)
        assert one.wire_bytes == 2 * 20 * (one.group_size - 1) / one.group_size


def test_loops_multiply_and_lines_are_traced_back():
    def body(x):
        def inner(x, _):
            y = lax.psum(x, "fsdp")
            return lax.pcast(y, ("fsdp",), to="varying") / 2, None

        def outer(x, _):
            x, _ = lax.scan(inner, x, None, length=3)
            return lax.ppermute(x, "tensor", [(0, 1), (1, 0)]), None

        return lax.scan(outer, x, None, length=5)[0]

    found = {c.kind: c for c in hlo.parse_hlo(program(body, jnp.ones((8, 6))), MESH)}
    assert found["all_reduce"].executions == 15
    assert found["permute"].executions == 5
    assert found["permute"].axes == ("tensor",)
    assert found["permute"].wire_bytes == 5 * 24
    file, line = found["all_reduce"].source.rsplit(":", 1)
    assert (
        'lax.psum(x, "fsdp")'
        in pathlib.Path(file).read_text().splitlines()[int(line) - 1]
    )


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
        ("replica_groups={{0,3},{1,2},{4,7},{5,6}}", ()),
    ],
)
def test_groups_in_every_form(groups, axes):
    (one,) = hlo.parse_hlo(TEXT.format(groups=groups), MESH)
    assert one.axes == axes


def test_what_cannot_be_read_is_an_error():
    with pytest.raises(ValueError, match="cannot read the replica groups"):
        hlo.parse_hlo(TEXT.format(groups="replica_groups=<new>"), MESH)
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.parse_hlo("module {}", MESH)


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


def test_asynchronous_pairs_count_once():
    gather, permute = hlo.parse_hlo(ASYNCHRONOUS, MESH)
    assert gather.asynchronous and gather.payload_bytes == 32 * 8 * 2
    assert permute.kind == "permute" and permute.payload_bytes == 4 * 8 * 2
    assert permute.axes == ("tensor",)


SCHEDULED = """
%start (p: bf16[4,8]) -> (bf16[4,8], bf16[32,8]) {
  %p = bf16[4,8]{1,0} parameter(0)
  %g.1 = bf16[32,8]{1,0} all-gather(%p), replica_groups={}, \
frontend_attributes={chain_id="0"}
  ROOT %c = (bf16[4,8]{1,0}, bf16[32,8]{1,0}) custom-call(%g.1)
}
%middle (p: bf16[4,8]) -> bf16[4,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  %g.2 = bf16[32,8]{1,0} all-gather(%p), replica_groups={}, \
frontend_attributes={chain_id="0"}
  ROOT %d = bf16[4,8]{1,0} dot(%p, %p)
}
%done (p: bf16[4,8]) -> bf16[32,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  %g.3 = bf16[32,8]{1,0} all-gather(%p), replica_groups={}, \
frontend_attributes={chain_id="0"}
  ROOT %c = bf16[32,8]{1,0} custom-call(%g.3)
}
ENTRY %main (p: bf16[4,8]) -> bf16[32,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  %a = (bf16[4,8]{1,0}, bf16[32,8]{1,0}) fusion(%p), kind=kCustom, calls=%start
  %b = bf16[4,8]{1,0} fusion(%p), kind=kOutput, calls=%middle
  %e = bf16[32,8]{1,0} fusion(%b), kind=kCustom, calls=%done
  %q = (bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[], u32[]) collective-permute-start(%b), \
source_target_pairs={{0,1},{2,3},{4,5},{6,7}}
  %f = bf16[4,8]{1,0} dot(%b, %b)
  %r = bf16[4,8]{1,0} collective-permute-done(%q)
  ROOT %s = bf16[4,8]{1,0} all-reduce(%r), replica_groups={}
}
"""


def test_fragments_of_a_chain_count_once_and_overlap_is_seen():
    gather, permute, reduction = hlo.parse_hlo(SCHEDULED, MESH)
    assert gather.kind == "all_gather" and gather.payload_bytes == 32 * 8 * 2
    assert gather.asynchronous and gather.overlapped
    assert permute.overlapped and not reduction.overlapped
    for busy in ("dot(%b, %b)", "fusion(%p), kind=kOutput, calls=%middle"):
        idle = SCHEDULED.replace(busy, "copy(%p)")
        assert [one.overlapped for one in hlo.parse_hlo(idle, MESH)].count(True) == 1


@pytest.mark.parametrize(
    "layout, payloads",
    [("data=8", 2.0), ("fsdp=8,zero=1", 3.0), ("fsdp=8,zero=2", 3.0)],
)
def test_a_step_by_the_compiler_moves_what_theory_says_of_it(layout, payloads):
    """In payloads of all parameters times (n-1)/n, but for the scalars.

    On CPUs it all-reduces gradients and gathers updated parameters.
    """
    tiny = model()
    program = lower(layout, tiny, optax.sgd(0.1), lowering="jit")
    payload = 4 * sum(p.size for p in tiny.params.values()) * 7 / 8
    moved = sum(c.wire_bytes for c in program.collectives)
    np.testing.assert_allclose(moved / payload, payloads, rtol=0.01)
    assert {c.axes for c in program.collectives} == {(layout.split("=")[0],)}
    assert program.violations() == []
