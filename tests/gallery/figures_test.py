"""The figures' quick versions are accepted, and their checks see what is wrong."""

import json
import pathlib
import runpy

import numpy as np
import pytest
from support import figures, tiny_stack
from support.figures import failed
from support.marks import slow

from experiments.gallery import (
    catalog,
    gradient_coding,
    gradient_diversity,
    hyperparameter_search,
    layer_dropping,
)
from meshpar.methods import layer_dropping as layer_drop
from meshpar.methods.gradient_coding import codes as coding
from meshpar.methods.random_search import trials

DOCS = pathlib.Path(__file__).parents[2] / "docs"


FAST = (
    "scaling",
    "pipeline_bubbles",
    "gossip",
    "poseidon",
    "model_sizes",
)


@pytest.mark.parametrize(
    "name", [*FAST, *(slow(name) for name in catalog.PAPERS if name not in FAST)]
)
def test_quick_versions_are_accepted(name):
    figures.check(name)


def test_a_code_that_sums_wrong_parts_is_not_accepted(monkeypatch):
    def wrong(workers, stragglers):
        code = coding.cyclic(workers, stragglers)
        matrix = code.matrix.copy()
        matrix[0] *= 1.001
        return coding.Code(matrix, stragglers)

    right = coding.Code.decode
    exact = coding.cyclic(gradient_coding.DEVICES, 1)
    monkeypatch.setattr(coding.Code, "decode", lambda _, alive: right(exact, alive))
    error, _ = gradient_coding.largest_error(wrong, 1)
    assert error > 1e-5


def test_advice_for_rows_that_count_their_copies_is_seen(monkeypatch):
    right = gradient_diversity.diversity

    def wrong(weights, x, y):  # The bound as if copies were rows of their own.
        found = right(weights, x, y)
        copies = len(x) / len(np.unique(x, axis=0))
        return type(found)(found.rows, found.squares * copies, found.square_of_sum)

    monkeypatch.setattr(gradient_diversity, "diversity", wrong)
    assert failed(gradient_diversity.meter_claims())


@pytest.mark.slow
def test_trials_equal_runs_and_other_trials_do_not(monkeypatch):
    claims = hyperparameter_search.equality_claims(runs=1, steps=2)
    assert failed(claims) == []
    values = hyperparameter_search.grid_values(4)
    assert len(values["rate"]) == 64 and len(set(values["rate"])) == 4
    monkeypatch.setattr(trials.Trials, "_one_step", swapped(trials.Trials._one_step))
    assert failed(hyperparameter_search.equality_claims(runs=1, steps=2))


def swapped(one_step):
    """A step whose learning rate is not the trial's own."""

    def step(self, values, state, batch):
        return one_step(self, values | {"rate": values["rate"] * 1.01}, state, batch)

    return step


def test_the_expected_best_of_some_trials():
    losses = np.array([3.0, 1.0, np.inf, 2.0])
    best = hyperparameter_search.expected_best
    assert best(losses[[0, 1, 3]], 1) == pytest.approx(2)
    assert best(losses[[0, 1, 3]], 2) == pytest.approx((1 + 1 + 2) / 3)
    assert best(losses, 4) == 1 and best(losses, 1) == np.inf
    assert best(losses, 2) == pytest.approx((3 * 1 + 2 * 2 + 3) / 6)


@pytest.mark.slow
def test_layers_that_run_without_the_schedule_are_counted():
    batches, counter = (
        [tiny_stack.batch(), tiny_stack.batch(1)],
        layer_dropping.LayerCounter(),
    )
    model, schedule = counter.counted(tiny_stack.model()), lambda t: 0.1
    program = layer_dropping._program(model, schedule, batches[0])
    depth = model.layered.depth
    ran = layer_drop.layers_run(schedule, 2, depth)
    wanted = ran.sum(axis=1).tolist()
    check = layer_dropping.count_claim
    assert check(program, counter, batches, wanted).holds
    assert not check(program, counter, batches, [depth] * 2).holds


def test_the_page_shows_the_committed_full_versions():
    page = runpy.run_path(str(DOCS / "papers.py"))["page"]
    assert (DOCS / "papers/index.md").read_text() == page(), "run docs.papers"
    for name in catalog.PAPERS:
        found = json.loads((DOCS / f"papers/{name}.json").read_text())
        missed = [c["text"] for c in found["claims"] if not c["holds"]]
        assert missed == [] and not found["quick"], name
        assert (DOCS / f"papers/{name}.png").stat().st_size < 60_000
