"""The planner's factors are found again from times that known factors make."""

import types

import numpy as np

from experiments.benchmarks import planner_fit
from meshpar.planner.seconds import FACTORS, Factors


def test_known_factors_are_found_again(monkeypatch):
    rng = np.random.default_rng(0)
    bytes_of_programs = rng.uniform(0.1, 1.0, (60, len(Factors._fields)))

    def times(factors, predictor, found):
        return 1.0 + bytes_of_programs @ np.array(factors)

    monkeypatch.setattr(planner_fit, "times", times)
    kept = {name: getattr(FACTORS, name) for name in ("state_moves",)}
    true = Factors(*rng.uniform(1.0, 9.0, len(Factors._fields)).round(2))
    true = true._replace(**kept)
    found = [types.SimpleNamespace(seconds=x) for x in times(true, None, None)]
    fitted = planner_fit.fitted(FACTORS, None, found)
    np.testing.assert_allclose(fitted, true, atol=0.02)
