"""A paper of the gallery: its figure, its table and the claims that accept it."""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import matplotlib.figure
import PIL.Image

_INCHES, _DOTS_PER_INCH, _COLORS = (7.2, 4.2), 100, 64


@dataclasses.dataclass(frozen=True)
class Claim:
    """One line of acceptance.

    Attributes:
      text: the claim.
      paper: what the paper says; "" for a law that no paper states in numbers.
      found: what our program found.
      holds: whether the claim holds.
    """

    text: str
    paper: str
    found: str
    holds: bool


@dataclasses.dataclass(frozen=True)
class Result:
    """The findings of a paper's program.

    Attributes:
      columns: header of the printed table.
      rows: of the table, each with one text per column.
      claims: all must hold.
      numbers: plain values, which are written as JSON.
      draw: draws the picture on an empty figure; None of a result that was written in
        another process.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    claims: tuple[Claim, ...]
    numbers: dict[str, Any]
    draw: Callable[[matplotlib.figure.Figure], None] | None

    @property
    def accepted(self) -> bool:
        """Whether all claims hold."""
        return all(claim.holds for claim in self.claims)


@dataclasses.dataclass(frozen=True)
class Setting:
    """The settings with which a paper's program runs.

    Attributes:
      quick: whether it shall run for less than a minute, on fewer or smaller cases.
      seeds: of what is drawn; several where a figure has error bars.
      progress: is told what is done next, and the share that is done, from 0 to 1.
    """

    quick: bool
    seeds: tuple[int, ...]
    progress: Callable[[str, float], None]


@dataclasses.dataclass(frozen=True)
class Paper:
    """A figure of a paper, and the program that computes it.

    Attributes:
      name: of the command line and of the files.
      title: of the figure.
      source: authors, venue, year and the sections or figures.
      shows: the figure in one line.
      run: computes it.
    """

    name: str
    title: str
    source: str
    shows: str
    run: Callable[[Setting], Result]


def as_json(paper: Paper, setting: Setting, result: Result) -> dict[str, Any]:
    """A paper and its result as plain values."""
    return {
        "name": paper.name,
        "title": paper.title,
        "source": paper.source,
        "shows": paper.shows,
        "quick": setting.quick,
        "seeds": list(setting.seeds),
        "accepted": result.accepted,
        "claims": [dataclasses.asdict(claim) for claim in result.claims],
        "columns": list(result.columns),
        "rows": [list(row) for row in result.rows],
        "numbers": result.numbers,
    }


def write(
    paper: Paper, setting: Setting, result: Result, folder: pathlib.Path
) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes NAME.png and NAME.json to a folder, which is made; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    picture, numbers = (folder / f"{paper.name}.{kind}" for kind in ("png", "json"))
    figure = matplotlib.figure.Figure(_INCHES, _DOTS_PER_INCH, layout="constrained")
    result.draw(figure)
    figure.savefig(picture, facecolor="white")
    # A palette makes the picture three times smaller.
    with PIL.Image.open(picture) as image:
        image.convert("RGB").quantize(_COLORS).save(picture, optimize=True)
    plain = lambda x: x.tolist()  # Of numpy's numbers and arrays.  # noqa: E731
    text = json.dumps(as_json(paper, setting, result), indent=1, default=plain)
    numbers.write_text(text + "\n")
    return picture, numbers
