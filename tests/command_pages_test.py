"""Pages that commands write: a browser shows them whole, in both themes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import browser, page_checks, tiny_stack
from support.explanations import explanation

import meshpar
from meshpar.commands.reports import page as explain_page
from meshpar.commands.reports import plan_page
from meshpar.explain import explain

WIDTHS = 400, 1400
LAYOUT = "data=2,fsdp=2,tensor=2,microbatches=4,remat=full"
pytestmark = pytest.mark.skipif(
    not browser.CHROMIUM, reason="chromium is missing: apt-get install chromium"
)


@pytest.fixture(scope="module")
def page():
    with browser.open_page() as page:
        yield page


def write_explanations(path):
    program = tiny_stack.lower("pipe=2,fsdp=2,tensor=2,microbatches=4")
    command = (
        f"python -m experiments.plan --recipe=tiny --layout={LAYOUT} --html=x.html"
    )
    explanations = [explain(program), explanation(LAYOUT, 5e6)]
    explain_page.write(path, "tiny", explanations, command)


def write_plan(path):
    plans = meshpar.plan(
        tiny_stack.model(), optax.adam(1e-3), tiny_stack.batch(), jax.devices()[:2]
    )
    compiled = [explanation(str(plans.layout), 5e6)]
    plan_page.write(path, "a stack on two devices", plans, compiled, 3)


def write_check(path):
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("rows"))
    x = jax.device_put(np.ones((64, 32), np.float32), rows)
    step = jax.jit(lambda x: (x - jnp.mean(x @ x.T), x))
    meshpar.check(step, x).html(path)


WRITERS = write_explanations, write_plan, write_check


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    """{writer: address of its page}."""
    folder = tmp_path_factory.mktemp("pages")
    paths = {write: folder / f"{write.__name__}.html" for write in WRITERS}
    for write, path in paths.items():
        write(path)
    return {write: path.as_uri() for write, path in paths.items()}


@pytest.mark.parametrize("write", WRITERS)
def test_a_page_can_be_read_and_asks_for_nothing_else(write, addresses, page):
    page.requests.clear()
    for theme in ("light", "dark"):
        page.prefer(theme)
        page.open(addresses[write])
        for width in WIDTHS:
            page.resize(width)
            assert page_checks.problems(page) == [], (theme, width)
    others = {url for url in page.requests if not url.startswith("data:")}
    assert others == {addresses[write]} and not page.errors
    links = page.value("document.querySelectorAll('nav a').length")
    assert links == page.value("document.querySelectorAll('h2').length") >= 3


PICTURE = """<svg viewBox="0 0 100 20" width="100" height="20">
<path d="M 0 0 H 100 V 20 H 0 z" fill="#777"/>
<g id="text_1" fill="#888"><!-- pale --><g transform="scale(0.05 -0.05)">
<path d="M 500 -300 H 900 V -50 H 500 z"/></g></g></svg>"""


@pytest.mark.parametrize(
    "body, found",
    [
        ("<div style='width: 600px'>wide</div>", "600 pixels on a window of 400"),
        ("<p style='margin-left: -9px'>left</p>", "left: leaves the page"),
        ("<p>one</p><p style='margin-top: -1.7em'>two</p>", "one: overlaps two"),
        ("<p style='color: #eee; background: #fff'>pale</p>", "pale: contrast 1.16"),
        ("<p style='font-size: 9px'>tiny</p>", "tiny: its font has 9 pixels"),
        ("<a href='#here'>there</a>", "#here: no such place on the page"),
        (PICTURE, "pale: contrast 1.26"),
        (PICTURE, "pale: its font has 5 pixels"),
        ("<div style='overflow: auto'><p style='width: 600px'>scrolls</p></div>", ""),
    ],
)
def test_what_is_wrong_with_a_page_is_found(body, found, tmp_path, page):
    path = tmp_path / "page.html"
    path.write_text(f"<!doctype html><body style='margin: 0'>{body}")
    page.resize(400)
    page.open(path.as_uri())
    problems = page_checks.problems(page)
    assert found in problems if found else problems == []


def test_errors_requests_and_missing_pictures_are_seen(tmp_path, page):
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<img src='missing.png'><script>missing()</script>"
        "<link rel='stylesheet' href='http://elsewhere.invalid/style.css'>"
    )
    page.errors.clear()
    page.open(bad.as_uri())
    assert page.broken_pictures() == [f"{tmp_path.as_uri()}/missing.png"]
    assert any("missing is not defined" in error for error in page.errors)
    assert "http://elsewhere.invalid/style.css" in page.requests
