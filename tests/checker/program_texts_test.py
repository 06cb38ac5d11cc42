"""Programs given as text alone: loops and asynchronous pairs that CPUs do not write."""

import meshpar

HEADER = "HloModule step, is_scheduled=true, num_partitions=4\n\n"

ASYNCHRONOUS = """\
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%wrapped (p: f32[64,8]) -> f32[16,8] {
  %p = f32[64,8]{1,0} parameter(0)
  ROOT %rs = f32[16,8]{1,0} reduce-scatter(%p), replica_groups={{0,1,2,3}}, \
dimensions={0}, to_apply=%sum
}

ENTRY %main (x: f32[64,8]) -> f32[16,8] {
  %x = f32[64,8]{1,0} parameter(0), metadata={op_name="x"}
  %start = ((f32[64,8]{1,0}), f32[16,8]{1,0}) async-start(%x), calls=%wrapped
  %dot = f32[64,64]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  ROOT %done = f32[16,8]{1,0} async-done(%start)
}
"""

LOOP = """\
%body (t: (s32[], f32[16,8], f32[64,8])) -> (s32[], f32[16,8], f32[64,8]) {
  %t = (s32[], f32[16,8]{1,0}, f32[64,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %w = f32[16,8]{1,0} get-tuple-element(%t), index=1
  %total = f32[64,8]{1,0} get-tuple-element(%t), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %same = f32[64,8]{1,0} all-gather(%w), replica_groups={{0,1,2,3}}, dimensions={0}
  %scaled = f32[64,8]{1,0} multiply(%total, %same)
  %other = f32[64,8]{1,0} all-reduce(%scaled), replica_groups={{0,1,2,3}}, \
to_apply=%sum
  %grown = f32[64,8]{1,0} add(%total, %other)
  ROOT %out = (s32[], f32[16,8]{1,0}, f32[64,8]{1,0}) tuple(%next, %w, %grown)
}

%condition (u: (s32[], f32[16,8], f32[64,8])) -> pred[] {
  %u = (s32[], f32[16,8]{1,0}, f32[64,8]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%u), index=0
  %end = s32[] constant(5)
  ROOT %less = pred[] compare(%j, %end), direction=LT
}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (w0: f32[16,8], x0: f32[64,8]) -> f32[64,8] {
  %w0 = f32[16,8]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}, \
metadata={op_name="weights"}
  %x0 = f32[64,8]{1,0} parameter(1), sharding={replicated}, metadata={op_name="x"}
  %zero = s32[] constant(0)
  %start = (s32[], f32[16,8]{1,0}, f32[64,8]{1,0}) tuple(%zero, %w0, %x0)
  %loop = (s32[], f32[16,8]{1,0}, f32[64,8]{1,0}) while(%start), \
condition=%condition, body=%body
  ROOT %r = f32[64,8]{1,0} get-tuple-element(%loop), index=2
}
"""


def test_a_wrapped_asynchronous_pair_counts_once_and_hides_beside_compute():
    report = meshpar.check(HEADER + ASYNCHRONOUS, mesh={"shards": 4})
    (move,) = report.collectives
    assert (move.kind, move.axes, move.collective.executions) == (
        ("reduce_scatter", ("shards",), 1)
    )
    assert move.wire_bytes == 64 * 8 * 4 * 3 / 4
    assert move.collective.asynchronous and report.exposed_bytes == 0
    # What begins hands x on, and holds its result alone.
    x, shard, dot = 64 * 8, 16 * 8, 64 * 64
    assert report.memory.bytes == 4 * (x + shard + dot)


def test_loops_are_multiplied_in_and_what_stays_the_same_is_found():
    report = meshpar.check(HEADER + LOOP, mesh={"shards": 4})
    gather, total = report.collectives
    assert gather.collective.executions == total.collective.executions == 5
    assert total.wire_bytes == 5 * 2 * 64 * 8 * 4 * 3 / 4
    found = {x.rule: x for x in report.findings}
    same = found["constant_in_loop"]
    assert "the all_gather of weights gives the same in each of 5 rounds" in same.what
    assert same.size == 4 * 64 * 8 * 4 * 3 / 4
    assert "each of 5 rounds" in found["reduced_in_every_round"].what
    assert "needless_all_reduce" in found  # x is the same everywhere.


def test_a_loop_that_the_data_decide_counts_once():
    text = LOOP.replace("s32[] constant(5)", "s32[] get-tuple-element(%u), index=0")
    report = meshpar.check(HEADER + text, mesh={"shards": 4})
    assert [m.collective.executions for m in report.collectives] == [1, 1]
