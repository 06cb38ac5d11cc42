"""The page of explain: units that fit, labels apart, both themes, nothing from afar."""

import itertools
import types

import pytest
from support import browser
from support.tiny_models import lower, model

from experiments.reports import page, pictures
from meshpar.explain.report import explain

LAYOUTS = "pipe=2,data=2,tensor=2,microbatches=4", "fsdp=8"


@pytest.fixture(scope="module")
def explanations():
    return [explain(lower(layout, model(depth=4))) for layout in LAYOUTS]


def sent(layout, *sizes):
    """What a picture of traffic reads: `sizes` are bytes over one axis each."""
    rows = [
        types.SimpleNamespace(axes=(f"axis{i}",), found_bytes=size, exposed_bytes=0.0)
        for i, size in enumerate(sizes)
    ]
    return types.SimpleNamespace(layout=layout, traffic=rows)


@pytest.mark.parametrize(
    ("size", "unit"), [(12.0, "B"), (3e3, "kB"), (4.5e6, "MB"), (6e10, "GB")]
)
def test_the_unit_fits_the_largest_bar(size, unit):
    figure = pictures.traffic_figure([sent("fsdp=8", size, size / 3)])
    (axes,) = figure.axes
    assert axes.get_xlabel() == f"sent per device and step, {unit}"
    assert 1 <= max(bar.get_width() for bar in axes.patches) < 1000
    assert axes.texts[0].get_text().strip().endswith(f" {unit}")


def test_no_label_overlaps_another(explanations):
    long = "replica=2,pipe=4,fsdp=8,tensor=4,microbatches=16,schedule=zb_h1"
    many = [sent(f"{long},zero={zero}", *range(1, 6)) for zero in (1, 2, 3)]
    for figure in (
        pictures.traffic_figure(many),
        pictures.traffic_figure(explanations),
        pictures.memory_figure(explanations),
    ):
        figure.canvas.draw()
        (axes,) = figure.axes
        labels = axes.get_yticklabels()
        boxes = [label.get_window_extent() for label in labels]
        assert len(boxes) > 1
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
        legend = [legend.get_window_extent() for legend in figure.legends]
        assert not any(a.overlaps(b) for a, b in itertools.product(boxes, legend))
        texts = [text.get_window_extent() for text in axes.texts]
        assert all(text.x1 <= figure.bbox.x1 for text in texts)


@pytest.mark.skipif(
    not browser.CHROMIUM, reason="chromium is missing: apt-get install chromium"
)
def test_the_page_can_be_read_in_both_themes_on_any_screen(explanations, tmp_path):
    path = tmp_path / "page.html"
    page.write(str(path), "tiny", explanations)
    ink = "getComputedStyle(document.querySelector('svg [id^=text] g')).fill"
    with browser.open_page() as shown:
        for theme in ("light", "dark"):
            shown.prefer(theme)
            shown.open(path.as_uri())
            for place in ("h1", "h3", "p", "td", "th", ".good"):
                assert shown.contrast(place) >= 4.5, (theme, place)
            color = shown.value("getComputedStyle(document.body).color")
            assert shown.value(ink) == color, theme
            for width in (400, 1400):
                shown.resize(width)
                found = shown.value("document.documentElement.scrollWidth")
                assert found <= width, theme
        assert not shown.errors
        assert set(shown.requests) == {path.as_uri()}
