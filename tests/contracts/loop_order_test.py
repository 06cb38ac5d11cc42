"""Collectives that may run among those of a loop, read from programs for CPUs."""

import pytest

from meshpar.contracts import loop_order
from meshpar.contracts.hlo import HloModule

PROGRAM = """
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %x = f32[8] get-tuple-element(%p), index=1
  %sum = f32[8] all-reduce(%x), replica_groups={}
  ROOT %t = (s32[], f32[8]) tuple(%i, %sum)
}
%quiet (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  ROOT %p = (s32[], f32[8]) parameter(0)
}
%condition (p: (s32[], f32[8])) -> pred[] {
  ROOT %p = (s32[], f32[8]) parameter(0)
}
%call (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  ROOT %permuted = f32[8] collective-permute(%a), source_target_pairs={{0,1}}
}
ENTRY %main (a: f32[8], b: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  %b = f32[8] parameter(1)
  %before = f32[8] all-gather(%b), dimensions={0}
  %first = (s32[], f32[8]) tuple(%i, %a)
  %loop = (s32[], f32[8]) while(%first), condition=%condition, body=%body
  %y = f32[8] get-tuple-element(%loop), index=1
  %z = f32[8] add(%y, %before)
  %after = f32[8] OPERATION
  ROOT %end = f32[8] add(%after, %z)
}
"""


def order_violations(text):
    return loop_order.order_violations(HloModule(text, {"data": 2}))


@pytest.mark.parametrize(
    "operation",
    [
        "all-reduce(%b), replica_groups={}",
        "all-reduce(%before), replica_groups={}",
        "fusion(%b), kind=kLoop, calls=%call",
        "while(%first), condition=%condition, body=%body",
    ],
)
def test_collectives_that_do_not_read_the_loop_before_them_are_found(operation):
    (line,) = order_violations(PROGRAM.replace("OPERATION", operation))
    assert line.startswith("after may run among") and "for, loop:" in line


@pytest.mark.parametrize(
    "operation",
    [
        "all-reduce(%z), replica_groups={}",
        "fusion(%y), kind=kLoop, calls=%call",
        "add(%b, %b)",
        "while(%first), condition=%condition, body=%quiet",
    ],
)
def test_what_reads_the_loop_or_moves_nothing_is_none_of_them(operation):
    assert order_violations(PROGRAM.replace("OPERATION", operation)) == []


def test_loops_without_collectives_mix_with_nothing():
    quiet = PROGRAM.replace("body=%body", "body=%quiet")
    other = "all-reduce(%b), replica_groups={}"
    assert order_violations(quiet.replace("OPERATION", other)) == []
