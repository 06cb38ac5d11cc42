"""The documentation site: it builds without warnings, and a browser shows it."""

import functools
import http.server
import os
import pathlib
import subprocess
import sys
import threading

import jax
import optax
import pytest
from support import browser, tiny_stack
from support.explanations import explanation

import meshpar
from docs import make_recording
from meshpar.commands.reports import page as report
from meshpar.commands.reports import plan_page

ROOT = pathlib.Path(__file__).parents[1]
WIDTHS = 400, 1400
pytest.importorskip("mkdocs", reason='mkdocs is missing: pip install -e ".[docs]"')
in_a_browser = pytest.mark.skipif(
    not browser.CHROMIUM, reason="chromium is missing: apt-get install chromium"
)


def build(folder, *arguments):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    options = dict(capture_output=True, text=True, cwd=ROOT, env=environment)
    return subprocess.run([*command, *arguments], **options)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site as it is built."""
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(site):
    """The site behind a server of this machine."""
    handler = functools.partial(Quiet, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def page():
    with browser.open_page() as page:
        yield page


@in_a_browser
def test_every_page_is_shown_whole_and_asks_no_other_machine(site, address, page):
    problems = []
    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site).as_posix()
        page.resize(WIDTHS[-1])
        page.open(f"{address}/{name}")
        problems += [f"{name}: {src} is missing" for src in page.broken_pictures()]
        for width in WIDTHS:
            page.resize(width)
            found = page.value("document.documentElement.scrollWidth")
            if found > width:
                problems.append(f"{name}: {found} pixels on a window of {width}")
    home = f"{address}/", "data:"
    problems += [url for url in page.requests if not url.startswith(home)]
    # The page for addresses that do not exist has none of its own.
    assert not problems and not page.errors


@in_a_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_in_both_themes(theme, address, page):
    page.prefer(theme)
    page.open(f"{address}/index.html")
    page.value("localStorage.clear()")  # The theme of the first visit is kept there.
    page.open(f"{address}/index.html")
    scheme = page.value("document.body.dataset.mdColorScheme")
    assert scheme == {"light": "default", "dark": "slate"}[theme]
    for place in ("h1", "p", "td a", "td", "pre code", ".md-nav__link"):
        assert page.contrast(f".md-main {place}") >= 4.5, place


def write_explanations(path):
    layouts = "data=2,fsdp=2,tensor=2,microbatches=4,remat=full", "fsdp=8"
    explanations = [explanation(layout, 5e6) for layout in layouts]
    report.write(path, "tiny", explanations, "python -m experiments.plan")


def write_plan(path):
    plans = meshpar.plan(
        tiny_stack.model(), optax.adam(1e-3), tiny_stack.batch(), jax.devices()[:2]
    )
    compiled = [explanation(str(plans.layout), 5e6)]
    plan_page.write(path, "a stack on two devices", plans, compiled, 3)


@in_a_browser
@pytest.mark.parametrize("write", [write_explanations, write_plan])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_of_reports_have_the_look_of_the_site(theme, write, tmp_path, page):
    write(tmp_path / "page.html")
    page.prefer(theme)
    page.requests.clear()
    page.open((tmp_path / "page.html").as_uri())
    assert [url for url in page.requests if not url.startswith("data:")] == [
        (tmp_path / "page.html").as_uri()
    ]
    for place in ("h1", "p", "td", ".good"):
        assert page.contrast(place) >= 4.5, place
    if write is write_explanations:
        assert page.contrast(".warn") >= 4.5
    ink = page.value("getComputedStyle(document.querySelector('svg text, svg')).color")
    assert ink == page.value("getComputedStyle(document.body).color")
    for width in WIDTHS:
        page.resize(width)
        assert page.value("document.documentElement.scrollWidth") <= width
    assert not page.errors


@in_a_browser
def test_the_search_finds_a_page(address, page):
    page.open(f"{address}/index.html")
    found = page.value(
        """new Promise((done) => {
          document.querySelector(".md-search__input").focus();
          document.querySelector(".md-search__input").value = "zero-bubble";
          document.querySelector(".md-search__input").dispatchEvent(
            new Event("keyup", {bubbles: true}));
          const look = () => {
            const hit = document.querySelector(".md-search-result__link");
            hit ? done(hit.href) : setTimeout(look, 50);
          };
          look();
        })"""
    )
    assert found.startswith(f"{address}/")


@in_a_browser
def test_what_is_wrong_with_a_page_is_found(tmp_path, page):
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<div style='width: 600px; color: #eee; background: #fff'>wide</div>"
        "<img src='missing.png'><script>missing()</script>"
        "<link rel='stylesheet' href='http://elsewhere.invalid/style.css'>"
    )
    page.errors.clear()
    page.resize(400)
    page.open(bad.as_uri())
    assert page.value("document.documentElement.scrollWidth") > 400
    assert page.broken_pictures() == [f"{tmp_path.as_uri()}/missing.png"]
    assert any("missing is not defined" in error for error in page.errors)
    assert page.contrast("div") < 1.5
    assert "http://elsewhere.invalid/style.css" in page.requests
    page.requests.clear()
    page.errors.clear()


def test_a_recording_shows_every_line_at_its_time():
    lines = [(1.0, "first"), (2.0, "a < b"), (3.0, "x" * 200)]
    text = make_recording.svg(lines)
    assert text.count("<text") == 1 + 4 + 1
    hidden = '<set attributeName="opacity" to="0" begin="0s" dur="6.00s"/>'
    assert f"a &lt; b{hidden}</text>" in text and "first</text>" in text
    most = make_recording.MOST
    assert make_recording.svg(lines * most).count("<text") == most
    committed = (ROOT / "docs/recording.svg").read_text()
    assert committed.count("<text") <= most and 'opacity="0"' not in committed
    assert make_recording.COMMAND in committed and "http://" not in committed[40:]
    assert len(committed) < 200_000
