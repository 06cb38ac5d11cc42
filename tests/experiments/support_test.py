"""The support matrix: refused cells are refused, and the page shows the matrix."""

import dataclasses
import functools
import pathlib

import pytest
from support.marks import slow
from support.tiny_models import lower, model, plain_model

import meshpar
from experiments.support import FEATURES, STRATEGIES, support_cells, support_table
from meshpar.layouts.refusals.reasons import UnsupportedError

DOCS = pathlib.Path(__file__).parents[2] / "docs"
DEEP = model(depth=8)
PLAIN = plain_model()


def lowered(cell):
    """The layout of the lowered program; cells recommend few layouts."""
    strategy, feature = cell.strategy, cell.feature
    kind = strategy.lowering, strategy.layered, feature.replicas, feature.clips
    return lowered_as(cell.layout, *kind)


@functools.cache
def lowered_as(layout, lowering, layered, replicas, clips):
    options = {"lowering": lowering}
    if replicas:
        options["mode"] = meshpar.LocalSGD()
    if clips:
        options["clip_norm"] = 1.0
    return lower(layout, DEEP if layered else PLAIN, **options).layout


def recommended(error):
    return str(error).partition("\nThis layout fits: ")[2]


refused_cells = pytest.mark.parametrize(
    "cell",
    [cell for cell in support_cells() if cell.reasons],
    ids=lambda cell: f"{cell.strategy.name}: {cell.feature.name}",
)


def refused(cell):
    """The layout that the error of a refused cell recommends."""
    with pytest.raises(UnsupportedError) as error:
        lowered(cell)
    assert error.value.reasons == cell.reasons
    for reason in cell.reasons:
        assert str(reason) in str(error.value)
    return recommended(error.value)


@refused_cells
def test_a_refused_cell_is_refused_with_its_reason_and_another_layout(cell):
    assert str(meshpar.layouts.parse(refused(cell))) != cell.layout


@pytest.mark.slow
@refused_cells
def test_the_layout_that_is_recommended_for_a_refused_cell_lowers(cell):
    fitting = refused(cell)
    layout = lowered(dataclasses.replace(cell, layout=fitting))
    assert str(layout) == fitting


@pytest.mark.parametrize(
    "feature",
    ["remat by layer", *map(slow, ("vocab=pipe", "local SGD", "prefetch"))],
)
def test_a_supported_cell_lowers(feature):
    cells = [c for c in support_cells() if c.feature.name == feature and not c.reasons]
    for cell in cells:
        assert lowered(cell) == meshpar.layouts.parse(cell.layout)


def test_the_matrix_has_all_cells_and_both_answers():
    cells = support_cells()
    assert len(cells) == len(STRATEGIES) * len(FEATURES)
    assert 20 < sum(bool(cell.reasons) for cell in cells) < len(cells) / 2


def test_the_page_shows_the_matrix():
    page = (DOCS / "support.md").read_text()
    assert support_table() in page, "run python -m docs.tables"
