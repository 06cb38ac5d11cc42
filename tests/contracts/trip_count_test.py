"""How often loops of compiled programs run."""

import pytest

from meshpar.contracts.hlo_text import parse_computations, trip_count

PROGRAM = """
%body (c: (f32[4], s32[])) -> (f32[4], s32[]) {
  ROOT %c = (f32[4]{0}, s32[]) parameter(0)
}
%cond (c: (f32[4], s32[])) -> pred[] {
  %c = (f32[4]{0}, s32[]) parameter(0)
  %end = s32[] constant(5)
  %i = s32[] get-tuple-element(%c), index=1
  ROOT %less = pred[] compare(%i, %end), direction=LT
}
ENTRY %main (x: f32[4]) -> (f32[4], s32[]) {
  %x = f32[4]{0} parameter(0)
  %first = s32[] constant(2)
  %start = s32[] copy(%first)
  %t = (f32[4]{0}, s32[]) tuple(%x, %start)
  ROOT %loop = (f32[4]{0}, s32[]) while(%t), condition=%cond, body=%body
}
"""


@pytest.mark.parametrize(
    "old, new, times",
    [
        ("", "", 3),
        ("copy(%first)", "constant(1)", 4),
        ("s32[] constant(2)", "s32[] parameter(1)", 5),
        ("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}', 7),
    ],
)
def test_a_loop_runs_from_its_first_number_to_the_end(old, new, times):
    """A compiler that runs rounds before the loop starts it at a higher number."""
    computations, entry = parse_computations(PROGRAM.replace(old, new))
    assert trip_count(computations[entry]["loop"], computations) == times
