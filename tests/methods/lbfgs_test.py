"""L-BFGS on ranges against SciPy's, iteration by iteration; portions and stragglers."""

import numpy as np
import pytest
import scipy.optimize

from meshpar.errors import MeshparError
from meshpar.methods.sandblaster import lbfgs
from meshpar.methods.sandblaster.line_search import LineSearch
from meshpar.methods.sandblaster.portions import schedule


def logistic():
    """A badly scaled problem of 60 weights: (value and gradient, number of weights)."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 60)) / np.sqrt(np.arange(1, 61))
    y = np.where(rng.random(200) < 0.5, 1.0, -1.0)

    def value_and_gradient(w):
        margins = y * (x @ w)
        value = np.logaddexp(0, -margins).sum() + 0.01 * (w @ w)
        return value, x.T @ (-y / (1 + np.exp(margins))) + 0.02 * w

    return value_and_gradient, 60


def rosenbrock():
    """A curved valley, whose line searches bracket and extrapolate."""
    return lambda w: (scipy.optimize.rosen(w), scipy.optimize.rosen_der(w)), 10


def run(function, size, num_ranges, iterations, memory=10):
    cuts = [size * i // num_ranges for i in range(num_ranges + 1)]
    pairs = zip(cuts, cuts[1:], strict=False)
    ranges = [lbfgs.VectorRange(a, b) for a, b in pairs]

    def evaluate():
        parts = [part.vectors[lbfgs.WEIGHTS] for part in ranges]
        value, gradient = function(np.concatenate(parts))
        for part in ranges:
            part.vectors[lbfgs.GRADIENT] = gradient[part.start : part.stop]
        return value

    return list(lbfgs.Coordinator(ranges, evaluate, memory).run(iterations))


def scipy_run(function, size, iterations, memory=10):
    values = []
    found = scipy.optimize.minimize(
        function,
        np.zeros(size),
        jac=True,
        method="L-BFGS-B",
        callback=lambda intermediate_result: values.append(intermediate_result.fun),
        options=dict(maxiter=iterations, maxcor=memory, ftol=0, gtol=0),
    )
    return values, found.nfev


@pytest.mark.parametrize("make, iterations", [(logistic, 45), (rosenbrock, 45)])
@pytest.mark.parametrize("memory", [3, 10])
def test_every_iteration_equals_scipys(make, iterations, memory):
    function, size = make()
    expected, evaluations = scipy_run(function, size, iterations, memory)
    found = run(function, size, 3, iterations, memory)
    assert len(found) == len(expected) == iterations
    np.testing.assert_allclose([x.value for x in found], expected, rtol=1e-6)
    assert found[-1].evaluations == evaluations


def test_the_number_of_ranges_changes_rounding_alone():
    function, size = logistic()
    one, many = (run(function, size, count, 30) for count in (1, 60))
    values = [[x.value for x in found] for found in (one, many)]
    np.testing.assert_allclose(*values, rtol=1e-12)


def test_lbfgs_stops_at_the_tolerance_and_at_the_minimum():
    function, size = logistic()
    cut = [lbfgs.VectorRange(0, size)]

    def evaluate():
        value, cut[0].vectors[lbfgs.GRADIENT] = function(cut[0].vectors[lbfgs.WEIGHTS])
        return value

    found = list(lbfgs.Coordinator(cut, evaluate).run(1000, tolerance=1e-3))
    assert found[-1].gradient_norm <= 1e-3 < found[-2].gradient_norm
    assert len(run(function, size, 2, 1000)) < 300  # No step decreases it any more.


def test_the_memory_is_at_least_one_pair():
    with pytest.raises(MeshparError, match="memory=0: use"):
        lbfgs.Coordinator([], lambda: 0.0, memory=0)


# Portions.


def cost(num_workers, portions, backup):
    """Time of a batch with one worker that is 10 times slower, over that without."""
    work = [1 / portions] * (num_workers * portions)
    slow = [1.0] * (num_workers - 1) + [0.1]
    whole = schedule(work, [1.0] * num_workers, backup).seconds
    return schedule(work, slow, backup).seconds / whole


def test_a_tenfold_straggler_costs_less_than_a_third_with_backups():
    assert cost(4, 200, backup=True) < 1.3  # No schedule is below 4 / 3.1 = 1.29.
    assert cost(8, 25, backup=True) < 1.17
    assert cost(8, 25, backup=False) > cost(8, 25, backup=True)
    assert cost(4, 1, backup=False) == 10 and cost(4, 1, backup=True) == 2


def test_every_portion_counts_once_and_the_first_copy_wins():
    found = schedule([1.0] * 7, [1.0, 1.0, 0.1], backup=True)
    assert sorted(found.order) == list(range(7))
    assert found.backups == 1 and found.seconds == 4
    assert found.workers[2] in (0, 1)  # The straggler began with it.
    without = schedule([1.0] * 7, [1.0, 1.0, 0.1], backup=False)
    assert without.backups == 0 and without.seconds == 10
    assert without.workers[2] == 2
    assert schedule([], [1.0], backup=True).seconds == 0


def test_a_copy_is_made_only_if_it_would_be_done_earlier():
    assert schedule([1.0, 10.0], [1.0, 1.0], backup=True).backups == 0
    assert schedule([1.0, 10.0], [1.0, 0.5], backup=True).backups == 1


@pytest.mark.parametrize("speeds", [[], [1.0, 0.0], [float("inf")]])
def test_workers_have_speeds(speeds):
    with pytest.raises(MeshparError, match="use numbers above 0"):
        schedule([1.0], speeds, backup=False)


# The line search.


def wave(step):
    """A slope down with waves: searches bracket, extrapolate and bisect."""
    value = -0.3 * step + 0.1 * step**2 / (1 + step) - 0.15 * np.sin(3 * step)
    slope = -0.3 + 0.1 * (step**2 + 2 * step) / (1 + step) ** 2
    return value, slope - 0.45 * np.cos(3 * step)


def needle(step):
    """Flat at first, then steep: the first stage has to move far."""
    return -step / (step**2 + 2), (step**2 - 2) / (step**2 + 2) ** 2


def wall(step):
    """A deep and narrow minimum far from the start."""
    return (step + 0.004) ** 5 - 2 * (step + 0.004) ** 4, 5 * (
        step + 0.004
    ) ** 4 - 8 * (step + 0.004) ** 3


def kink(step):
    """Straight down to 1, then steeply up: interpolation alone narrows it slowly."""
    return (-step, -1.0) if step < 1 else (9 * step - 10, 9.0)


def test_a_pair_without_curvature_is_not_remembered():
    """Left of the kink the gradient does not change, so the pair would divide by 0."""
    values = [found.value for found in run(_kink_of, 1, 1, 5)]
    assert len(values) > 1 and values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(-1, abs=0.05)


def _kink_of(w):
    value, slope = kink(float(w[0]) / 2.3)
    return value, np.array([slope / 2.3])


@pytest.mark.parametrize("function", [wave, needle, wall, kink])
def test_steps_equal_those_of_scipys_line_search(function):
    theirs = pytest.importorskip("scipy.optimize._dcsrch", reason="private to SciPy")
    for first in 10.0 ** np.arange(-3, 4, 0.25):
        expected = []

        def value(step, tried=expected):
            tried.append(step)
            return function(step)[0]

        start, slope = function(0.0)
        search = theirs.DCSRCH(
            value, lambda step: function(step)[1], 1e-3, 0.9, 0.1, 0.0, 1e10
        )
        search(first, start, slope, maxiter=20)
        mine, tried = LineSearch(start, slope, first), []
        while not mine.done and len(tried) < len(expected):
            tried.append(mine.step)
            mine.tell(*function(mine.step))
        np.testing.assert_allclose(tried, expected, rtol=1e-9)
