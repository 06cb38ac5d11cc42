"""Figures of pipelines, searches and memory: accepted, and their judges judge."""

import numpy as np
import pytest
from support.figures import failed

from experiments.gallery import (
    decision_tree,
    flexflow,
    geeps,
    pipedream,
    pipedream_loops,
    zero_r,
)


def test_claims_that_compile_nothing_hold():
    claims = [*pipedream.partition_claims(5), *pipedream.configuration_claims()]
    assert failed([*claims, *decision_tree.count_claims(8)]) == []


def test_gradients_by_hand_are_differences_of_the_loss():
    draws = np.random.default_rng(0)
    weights = [draws.normal(size=(3, 3)) for _ in range(3)]
    x, y = draws.normal(size=(2, 4, 3))

    def loss():
        h = x
        for w in weights:
            h = np.tanh(h @ w)
        return np.mean((h - y) ** 2)

    for w, grad in zip(weights, pipedream_loops.gradients(weights, x, y), strict=True):
        for at in np.ndindex(w.shape):
            kept, values = w[at], []
            for step in (1e-6, -1e-6):
                w[at] = kept + step
                values.append(loss())
            w[at] = kept
            assert grad[at] == pytest.approx((values[0] - values[1]) / 2e-6, abs=1e-7)


def test_events_of_two_tasks_by_hand():
    task = flexflow._Task
    flops, link = flexflow._FLOPS, 10.0
    # 1 s of compute each; the first sends for 3 s.
    for waited, seconds in ((True, 5.0), (False, 4.0)):
        tasks = [task(flops, 30.0, waited), task(flops, 0.0, False)]
        assert flexflow.event_seconds(tasks, link) == pytest.approx(seconds)
    both = [task(flops, 30.0, False)] * 2
    assert flexflow.event_seconds(both, link) == pytest.approx(7.0)


STRAIGHT = """\
ENTRY %main (a: f32[10]) -> f32[] {
  %a = f32[10]{0} parameter(0)
  %b = f32[100]{0} broadcast(%a), dimensions={0}
  %c = f32[100]{0} negate(%b)
  %d = f32[50]{0} slice(%b), slice={[0:50]}
  %e = f32[100]{0} bitcast(%c)
  ROOT %f = f32[] fusion(%e, %d), kind=kLoop
}
"""


def test_live_bytes_of_a_schedule_by_hand():
    # b and c live together until d takes the place of b; a view has no bytes.
    assert zero_r.live_bytes(STRAIGHT) == (4 * 200, 4 * 250)


BODY = """\
%multiply (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = f32[8]{0} convolution(%x, %x), dim_labels=bf_io->bf
}

%body (w: f32[4]) -> f32[4] {
  %start = ((f32[4,SHAPE]{2,1,0:S(5)}, s32[]), f32[1,SHAPE]{2,1,0}, u32[]) \
dynamic-slice-start(%stack, %i)
  %used = f32[8]{0} fusion(%w), kind=kOutput, calls=%multiply
  %done = f32[1,SHAPE]{2,1,0} dynamic-slice-done(%start)
  %late = f32[8]{0} fusion(%used), kind=kOutput, calls=%multiply
}
"""


def test_matmuls_between_the_start_and_the_end_of_a_transfer_are_counted():
    part = f"{geeps._WIDTH // geeps._CHIPS},{geeps._HIDDEN}"
    text = BODY.replace("SHAPE", part)
    assert geeps.matmuls_beside(text) == [1]
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if "%used" in line)
    lines[at], lines[at + 1] = lines[at + 1], lines[at]
    assert geeps.matmuls_beside("\n".join(lines)) == [0]
