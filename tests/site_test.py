"""The documentation site: it builds without warnings, and a browser shows it."""

import functools
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest
from support import browser, page_checks

from docs import make_recording

ROOT = pathlib.Path(__file__).parents[1]
WIDTHS = 400, 1400
SCHEME = "data-md-color-scheme"
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
def test_every_page_can_be_read_and_asks_no_other_machine(site, address, page):
    problems = []
    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site).as_posix()
        page.resize(WIDTHS[-1])
        page.open(f"{address}/{name}")
        problems += [f"{name}: {src} is missing" for src in page.broken_pictures()]
        for width, scheme in zip(WIDTHS, ("slate", "default"), strict=True):
            page.resize(width)
            page.value(f"document.body.setAttribute({SCHEME!r}, {scheme!r})")
            found = page_checks.problems(page)
            problems += [f"{name}, {width} pixels, {scheme}: {x}" for x in found]
    home = f"{address}/", "data:"
    problems += [url for url in page.requests if not url.startswith(home)]
    # The page for addresses that do not exist has none of its own.
    assert not problems and not page.errors


@in_a_browser
@pytest.mark.parametrize(
    "theme, scheme", [("light", "default"), ("dark", "slate")], ids=["light", "dark"]
)
def test_the_theme_is_that_of_the_machine(theme, scheme, address, page):
    page.prefer(theme)
    page.open(f"{address}/index.html")
    page.value("localStorage.clear()")  # The theme of the first visit is kept there.
    page.open(f"{address}/index.html")
    assert page.value(f"document.body.getAttribute({SCHEME!r})") == scheme


SEARCH = """new Promise((done) => {
  const input = document.querySelector(".md-search__input");
  input.focus();
  input.value = WORDS;
  input.dispatchEvent(new Event("keyup", {bubbles: true}));
  const look = (tries) => {
    const hits = [...document.querySelectorAll(".md-search-result__link")];
    const found = hits.map((hit) => hit.href.replace(/\\?[^#]*/, ""));
    const enough = found.includes(ANSWER) || !tries;
    enough ? done(found) : setTimeout(look, 100, tries - 1);
  };
  look(600);
})"""


@in_a_browser
def test_the_search_finds_the_section_that_answers(address, page):
    page.open(f"{address}/index.html")
    answer = f"{address}/troubleshooting.html#out-of-memory"
    script = SEARCH.replace("WORDS", json.dumps("out of memory"))
    found = page.value(script.replace("ANSWER", json.dumps(answer)))
    assert answer in found, found


def test_the_index_of_the_search_has_the_section_on_memory(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    (found,) = (
        entry
        for entry in index["docs"]
        if entry["location"] == "troubleshooting.html#out-of-memory"
    )
    assert found["title"] == "Out of memory" and "offload=optimizer" in found["text"]


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
