"""Parts of HTML pages in the look of the site: tables, and the page itself."""

import html
import pathlib
import re
from collections.abc import Sequence

from meshpar.units import readable_bytes

_LOOK = pathlib.Path(__file__).parent / "look.css"
_SECTION = re.compile("<h2>(.*?)</h2>")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table, or "None." without rows; floats are bytes."""
    if not rows:
        return "<p>None.</p>"

    def cell(value: object) -> str:
        if isinstance(value, int | float):
            text = f"{value:,}" if isinstance(value, int) else readable_bytes(value)
            return f'<td class="number">{text}</td>'
        return f"<td>{html.escape(str(value))}</td>"

    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _breakable(title: str) -> str:
    """A title, as HTML, that may break behind the commas of a layout."""
    return re.sub(r",(?=\S)", ",<wbr>", title)


def _with_contents(body: str) -> str:
    """The body with a list of links to its sections, where it has several."""
    titles = list(map(_breakable, _SECTION.findall(body)))
    if len(titles) < 2:
        return body
    links = (f'<a href="#s{i}">{title}</a>' for i, title in enumerate(titles))
    headings = (f'<h2 id="s{i}">{title}</h2>' for i, title in enumerate(titles))
    body = _SECTION.sub(lambda _: next(headings), body)
    return f"<nav>{' '.join(links)}</nav>{body}"


def write(path: str, title: str, body: str) -> None:
    """Writes a page.

    Args:
      path: where to write it.
      title: plain text.
      body: HTML below the title; its sections begin with <h2>.
    """
    title = html.escape(title)
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_LOOK.read_text()}</style>"
        f'<body class="report"><h1>{_breakable(title)}</h1>{_with_contents(body)}'
        "</body></html>"
    )
    with open(path, "w", encoding="utf-8") as file:
        file.write(page)
