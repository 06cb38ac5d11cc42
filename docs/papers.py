"""Writes docs/papers/index.md, the page of the gallery, from the JSON beside it.

python -m experiments.papers --all --outputs=docs/papers
python -m docs.papers
"""

import json
import pathlib
from typing import Any

from experiments.gallery.catalog import PAPERS

FOLDER = pathlib.Path(__file__).parent / "papers"

_HEAD = """\
# The papers' figures, redone

Each figure below is computed anew by one command, on data that comes with Python and
its packages, and is accepted if all its claims hold; the tables say which do not.
Pictures and claims are those of the committed runs on CPUs. A smaller case of each:
`python -m experiments.papers --all --quick`. This page is written by
`python -m docs.papers`.
"""


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"


def _section(found: dict[str, Any]) -> str:
    """One paper: picture, command, claims and table."""
    name = found["name"]
    rows = [
        _cells("claim", "the paper says", "we got", "holds"),
        _cells("---", "---", "---", "---"),
    ]
    for claim in found["claims"]:
        holds = "yes" if claim["holds"] else "**no**"
        cells = claim["text"], claim["paper"] or "-", claim["found"], holds
        rows.append(_cells(*cells))
    return f"""
## {found["title"]}

{found["source"]}. {found["shows"][0].upper()}{found["shows"][1:]}.

![{found["shows"]}]({name}.png)

```bash
python -m experiments.papers {name}
```

{"".join(rows)}"""


def page() -> str:
    """The page of all papers whose full version is in the folder, in their order."""
    files = [FOLDER / f"{name}.json" for name in PAPERS]
    found = [json.loads(path.read_text()) for path in files if path.exists()]
    return _HEAD + "".join(map(_section, found))


def main() -> None:
    """Rewrites the page."""
    (FOLDER / "index.md").write_text(page())


if __name__ == "__main__":
    main()
