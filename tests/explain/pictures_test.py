"""Pictures of explanations: units that fit, labels apart, colors of the page."""

import dataclasses
import itertools

import matplotlib.backends.backend_agg
import pytest
from support.explanations import explanation

from meshpar.commands.reports import pictures, roofs
from meshpar.contracts.hlo_work import Work
from meshpar.mesh.chips import CHIPS
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


def test_a_roofline_has_each_batch_and_the_rows_that_reach_the_peak():
    chip = dataclasses.replace(CHIPS["v5e"], peak_flops=4e12, memory_bandwidth=1e12)
    # 2 + n FLOPs and 4 bytes: 4 FLOPs per byte, and so the peak, from 14 rows on.
    steps = roofs.Steps(chip, {n: Work(2.0 + n, 4.0) for n in (2, 6, 30)})
    assert [row[3:5] for row in steps.rows] == [
        ("1.0", "25%"),
        ("2.0", "50%"),
        ("8.0", "100%"),
    ]
    assert "from 4 FLOPs per byte on" in steps.words
    assert steps.words.endswith("gets there from 14 rows on")
    roof, over_batch = roofs.figure(steps).axes
    assert [text.get_text() for text in roof.texts] == ["2", "6", "30"]
    assert [tuple(line.get_xydata()[0]) for line in roof.lines[1:]] == [
        (1.0, 1.0),
        (2.0, 2.0),
        (8.0, 4.0),
    ]
    points = over_batch.lines[1].get_xydata()
    assert points.tolist() == [[2, 1], [6, 2], [30, 8]]
    never = roofs.Steps(chip, {n: Work(n, 4.0 * n) for n in (2, 6)})
    assert never.words.endswith("gets there at no number of rows")
