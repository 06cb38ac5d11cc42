"""Transfers between device and host memory, read from the text of a TPU program."""

from meshpar.contracts.host_transfers import (
    HostTransfer,
    host_transfers,
    host_violations,
)

PROGRAM = """\
HloModule step

%body (carry: (s32[], f32[3,8]{1,0:S(5)}, f32[3,8]{1,0})) -> (s32[], f32[3,8]) {
  %carry = (s32[], f32[3,8]{1,0:T(4,128)S(5)}, f32[3,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %m = f32[3,8]{1,0:T(4,128)S(5)} get-tuple-element(%carry), index=1
  %p = f32[3,8]{1,0} get-tuple-element(%carry), index=2
  %down = ((f32[3,8]{1,0:T(4,128)S(5)}, s32[]), f32[1,8]{1,0:T(1,128)}, u32[]{:S(2)}) dynamic-slice-start(%m, %i)
  %row = f32[1,8]{1,0:T(1,128)} dynamic-slice-done(%down)
  %near = ((f32[3,8]{1,0}, s32[]), f32[1,8]{1,0:S(1)}, u32[]{:S(2)}) dynamic-slice-start(%p, %i)
  %up = ((f32[3,8]{1,0:T(4,128)S(5)}, f32[1,8]{1,0:T(1,128)}, s32[]), f32[3,8]{1,0:T(4,128)S(5)}, u32[]{:S(2)}) dynamic-update-slice-start(%m, %row, %i)
  %new = f32[3,8]{1,0:T(4,128)S(5)} dynamic-update-slice-done(%up)
  ROOT %out = (s32[], f32[3,8]{1,0:T(4,128)S(5)}, f32[3,8]{1,0}) tuple(%i, %new, %p)
}

%cond (carry: (s32[], f32[3,8], f32[3,8])) -> pred[] {
  %carry = (s32[], f32[3,8], f32[3,8]) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %depth = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %depth), direction=LT
}

ENTRY %main (m: f32[3,8], e: bf16[4]) -> f32[3,8] {
  %m = f32[3,8]{1,0:T(4,128)S(5)} parameter(0)
  %e = bf16[4]{0:S(5)} parameter(1)
  %fetch = (bf16[4]{0}, bf16[4]{0:S(5)}, u32[]{:S(2)}) copy-start(%e)
  %here = bf16[4]{0} copy-done(%fetch)
  %local = (bf16[4]{0:S(1)}, bf16[4]{0}, u32[]{:S(2)}) copy-start(%here)
  %start = (s32[], f32[3,8]{1,0:S(5)}, f32[3,8]) tuple(%m, %m, %m)
  %loop = (s32[], f32[3,8]{1,0:S(5)}, f32[3,8]) while(%start), condition=%cond, body=%body
  ROOT %result = f32[3,8]{1,0:S(5)} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def test_slices_in_loops_and_copies_are_counted_by_direction():
    assert host_transfers(PROGRAM) == HostTransfer("as compiled", 3 * 32 + 8, 3 * 32)


def test_other_bytes_than_declared_are_violations():
    found = host_transfers(PROGRAM)
    exact = HostTransfer("state", 104, 96)
    assert host_violations([exact], found) == []
    assert host_violations([exact], None) == []
    assert host_violations([], found) == [
        "host memory: 104 bytes to the device found, 0 declared (nothing is offloaded)",
        "host memory: 96 bytes to the host found, 0 declared (nothing is offloaded)",
    ]
    (line,) = host_violations([HostTransfer("state", 104, 100)], found)
    assert line == "host memory: 96 bytes to the host found, 100 declared (state)"


def test_a_bound_may_be_used_in_part():
    found, state = host_transfers(PROGRAM), HostTransfer("state", 90, 90)
    assert host_violations([state, HostTransfer("saved", 20, 20, True)], found) == []
    assert host_violations([state, HostTransfer("saved", 10, 10, True)], found) != []
