"""The time of a schedule: what hides, what waits for a link, what loops multiply."""

import pytest

from meshpar.contracts import step_time

MESH = {"data": 2}
RATES = step_time.Rates(clock=1e6, link=500.0, host=1000.0)
"""1000 bytes take one second between chips (both ways), and as long to the host."""

CYCLES = 'backend_config={{"window_config":{{"estimated_cycles":"{}"}}}}'


def busy(name, cycles):
    config = CYCLES.format(cycles)
    return f"  %{name} = f32[8]{{0}} fusion(%p), kind=kLoop, calls=%c, {config}\n"


START = """  %s = (f32[500]{0}, f32[500]{0}) collective-permute-start(%q), \
source_target_pairs={{0,1},{1,0}}
"""
DONE = "  %d = f32[500]{0} collective-permute-done(%s)\n"
FETCH = "  %f = (f32[500]{0}, f32[500]{0:S(5)}, u32[]) copy-start(%h)\n"
FETCHED = "  %g = f32[500]{0} copy-done(%f)\n"
STORE = "  %u = (f32[500]{0:S(5)}, f32[500]{0}, u32[]) copy-start(%q)\n"
STORED = "  %v = f32[500]{0:S(5)} copy-done(%u)\n"
ALL_DONE = FETCHED + DONE + STORED
REDUCTION = "  %r = f32[500]{0} all-reduce(%q), replica_groups={{0,1}}\n"


def program(entry, more=""):
    parameters = "  %p = f32[8]{0} parameter(0)\n  %q = f32[500]{0} parameter(1)\n"
    return f"{more}ENTRY %main (p: f32[8]) -> f32[8] {{\n{parameters}{entry}}}\n"


def estimate(text):
    return step_time.estimate(text, MESH, RATES)


@pytest.mark.parametrize(
    "entry, compute, exposed",
    [
        (START + busy("a", 3_000_000) + DONE, 3, 0),
        (START + busy("a", 500_000) + DONE, 0.5, 1.5),
        (START + DONE + busy("a", 3_000_000), 3, 2),
        (busy("a", 3_000_000) + START + DONE, 3, 2),
        # The reduction waits for the link, which the permute has.
        (START + busy("a", 1_000_000) + REDUCTION + DONE, 1, 3),
        # Chips, and each direction of the host's link, do not wait for each other.
        (FETCH + START + STORE + busy("a", 500_000) + ALL_DONE, 0.5, 1.5),
        (FETCH + FETCH.replace("%f", "%x") + FETCHED + busy("a", 1_000_000), 1, 4),
    ],
    ids="hidden half before after shared_link own_links host_link".split(),
)
def test_a_transfer_hides_as_long_as_the_compute_beside_it(entry, compute, exposed):
    found = estimate(program(entry))
    assert found.compute_seconds == compute and found.exposed_seconds == exposed
    assert found.seconds == compute + exposed


LOOP = """%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %p = f32[8]{{0}} parameter(0)
  %q = f32[500]{{0}} parameter(1)
{body}}}
%condition (t: (s32[], f32[8])) -> pred[] {{
  ROOT %c = pred[] parameter(0)
}}
"""
WHILE = """  %w = (s32[], f32[8]) while(%t), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"4"}}
"""


def test_loops_multiply_compute_and_exposed_transfers():
    loop = LOOP.format(body=START + busy("a", 1_000_000) + DONE)
    found = estimate(program(WHILE + busy("b", 500_000), loop))
    assert found.cycles == 4.5e6 and found.exposed_seconds == 4
    assert found.transfer_seconds == 8
    (time,) = found.loops
    assert time.rounds == 4 and time.cycles == 4e6 and time.exposed_seconds == 4


BRANCHES = """%one (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
{one}}}
%two (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
{two}}}
"""
CHOICE = "  %k = f32[8]{0} conditional(%i, %p, %p), branch_computations={%one, %two}\n"


def test_the_slowest_branch_of_a_conditional_counts_alone():
    body = LOOP.format(body=busy("a", 1_000_000))
    branches = BRANCHES.format(one=WHILE, two=WHILE + busy("b", 3_000_000))
    found = estimate(program(CHOICE + busy("c", 500_000), body + branches))
    assert found.cycles == 7.5e6
    assert [loop.cycles for loop in found.loops] == [4e6]


def test_programs_without_cycles_have_no_estimate():
    assert estimate(program(REDUCTION)) is None
