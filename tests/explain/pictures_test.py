"""Pictures of explanations: units that fit, labels apart, colors of the page."""

import itertools

import matplotlib.backends.backend_agg
import pytest
from support.explanations import explanation

from meshpar.commands.reports import pictures
from meshpar.units import readable_bytes

LONG = "pipe=2,data=2,fsdp=2,tensor=2,microbatches=8,remat=full,prefetch=attention/q"
BARS = [pictures.memory_figure, pictures.traffic_figure]


@pytest.mark.parametrize("figure_of", BARS)
@pytest.mark.parametrize(
    ["size", "unit"], [(640, "B"), (6.4e3, "kB"), (6.4e6, "MB"), (6.4e9, "GB")]
)
def test_plots_have_the_unit_that_fits(figure_of, size, unit):
    (axes,) = figure_of([explanation("data=8", size)]).axes
    assert axes.get_xlabel().endswith(f", {unit}")
    assert max(bar.get_x() + bar.get_width() for bar in axes.patches) < 1000
    assert readable_bytes(size) in [text.get_text().strip() for text in axes.texts]


@pytest.mark.parametrize("figure_of", BARS)
def test_labels_are_whole_and_do_not_overlap(figure_of):
    layouts = (LONG, "data=8", "fsdp=8,zero=1")
    figure = figure_of([explanation(layout, 5e6) for layout in layouts])
    canvas = matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    canvas.draw()
    (axes,) = figure.axes
    labels = [*axes.get_yticklabels(), *axes.texts]
    boxes = [label.get_window_extent() for label in labels]
    assert len(boxes) >= 6
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
    for box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0
        assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
    text = "".join(label.get_text() for label in labels).replace("\n", "")
    assert LONG in text


def test_a_picture_takes_its_colors_from_the_page():
    for figure_of in BARS:
        svg = pictures.svg(figure_of([explanation("data=8", 5e6)]))
        assert "currentColor" in svg and pictures._INK not in svg
        assert "#ffffff" not in svg and "fill: black" not in svg


def test_a_layout_that_sends_nothing_has_an_empty_plot():
    silent = explanation("data=1", 0)
    (axes,) = pictures.traffic_figure([silent]).axes
    assert not axes.patches and not axes.get_yticklabels()
