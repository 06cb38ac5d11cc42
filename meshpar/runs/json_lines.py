"""Files of JSON rows, one a line, that a run adds to and that survive a kill."""

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, TextIO


def open_to_add(path: pathlib.Path) -> TextIO:
    """Opens a file for `add`; a last line that a kill has torn is ended first."""
    file = path.open("a", buffering=1)
    if not _ends_with_a_line(path):
        file.write("\n")
    return file


def add(file: TextIO, row: Mapping[str, Any]) -> None:
    """Adds a row, which a kill of this process leaves behind."""
    file.write(json.dumps(row) + "\n")


def read(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Generates the rows of a file, none if there is no file.

    Lines that are no rows, such as the last one of a killed process, are left out.
    """
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _ends_with_a_line(path: pathlib.Path) -> bool:
    """Whether a file is empty or its last line complete."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read() in (b"", b"\n")
