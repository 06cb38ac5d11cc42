"""The planner's numbers are found again from times that known numbers make."""

import itertools
import types

import numpy as np

from experiments.benchmarks import planner_fit
from meshpar.mesh.machine import ELEMENTWISE, NARROW
from meshpar.planner.seconds import FACTORS, Factors


def test_known_numbers_are_found_again(monkeypatch):
    rng = np.random.default_rng(0)
    seconds_of_programs = rng.uniform(0.1, 1.0, (60, len(Factors._fields) + 5))

    def times(numbers, predictor, found):
        chips = numbers.narrow.values(), numbers.elementwise.values()
        every = [*numbers.factors, *itertools.chain(*chips)]
        return 1.0 + seconds_of_programs @ np.array(every)

    def drawn(count):
        return rng.uniform(1.0, 9.0, count).round(2).tolist()

    monkeypatch.setattr(planner_fit, "times", times)
    true = planner_fit.Numbers(
        Factors(*drawn(len(Factors._fields)))._replace(state_moves=FACTORS.state_moves),
        dict(zip(NARROW, drawn(3), strict=True)),
        dict(zip(ELEMENTWISE, drawn(2), strict=True)),
    )
    found = [types.SimpleNamespace(seconds=x) for x in times(true, None, None)]
    start = planner_fit.Numbers(FACTORS, NARROW, ELEMENTWISE)
    fitted = planner_fit.fitted(start, None, found)
    np.testing.assert_allclose(fitted.flat(), true.flat(), atol=0.02)
    assert fitted.factors.state_moves == FACTORS.state_moves
