"""Parts of HTML pages in the look of the site: tables, and the page itself."""

import html
import pathlib
from collections.abc import Sequence

from meshpar.units import readable_bytes

_LOOK = pathlib.Path(__file__).parent / "look.css"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; floats are bytes."""

    def cell(value: object) -> str:
        if isinstance(value, int | float):
            text = f"{value:,}" if isinstance(value, int) else readable_bytes(value)
            return f'<td class="number">{text}</td>'
        return f"<td>{html.escape(str(value))}</td>"

    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def write(path: str, title: str, body: str) -> None:
    """Writes a page.

    Args:
      path: where to write it.
      title: plain text.
      body: HTML below the title.
    """
    title = html.escape(title)
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_LOOK.read_text()}</style>"
        f'<body class="report"><h1>{title}</h1>{body}</body></html>'
    )
    with open(path, "w", encoding="utf-8") as file:
        file.write(page)
