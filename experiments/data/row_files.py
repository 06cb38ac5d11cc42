"""Files of rows: JSON lines, parquet, csv. A field of every row is a document."""

import csv
import gzip
import json
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from experiments.data.files import SEPARATOR
from experiments.data.steady_file import read_whole
from meshpar.errors import DataError, nearest, shown

_LONGEST = 2**31 - 1
"""Characters of a field of a csv file; the csv module's own limit is 131,072."""

Rows = Iterator[tuple[str, Mapping[str, Any]]]
"""Places in a file, such as "line 3", and the rows there."""


def read_rows(files: Sequence[pathlib.Path], field: str) -> list[bytes]:
    """Texts of the rows of files: files in the order of their paths, rows as they are.

    Args:
      files: files of rows, with or without `.gz` at the end.
      field: the field of every row that holds its text.

    Raises:
      DataError: a file that cannot be read or holds no row, a row without the field, or
        with something else than a text there, or texts that are all empty.
    """
    documents = []
    for path in sorted(files):
        rows = _rows(path, field)
        texts = [_text(f"{path}, {place}", row, field) for place, row in rows]
        if not texts:
            raise DataError(f"{path} holds no row; give files with rows")
        documents += [text for text in texts if text.strip()]
    if not documents:
        raise DataError(
            f"{len(files)} file(s) such as {files[0]}: the field {field!r} is empty in "
            "all rows; name the field that holds the text as data.field"
        )
    return documents


def _text(place: str, row: Mapping[str, Any], field: str) -> bytes:
    """The text of a row, encoded."""
    _check_field(place, field, row)
    text = row[field]
    if not isinstance(text, str):
        raise DataError(
            f"{place}: {field!r} is {shown(repr(text))}, and not a text; write a "
            "string there, or name another field as data.field"
        )
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: {field!r} is not Unicode ({error}); write the character itself"
        ) from error
    if SEPARATOR in encoded:
        raise DataError(
            f"{place}: {field!r} holds a zero character, which separates documents; "
            "remove it"
        )
    return encoded


def _check_field(place: str, field: str, fields: Mapping[str, Any]) -> None:
    """Raises DataError, which names the nearest field, where there is no such one."""
    if field not in fields:
        known = shown(nearest(field, map(str, fields))) if fields else "it has none"
        raise DataError(
            f"{place}: there is no field {field!r} ({known}); name the field that "
            "holds the text as data.field"
        )


def _rows(path: pathlib.Path, field: str) -> Rows:
    """The rows of one file.

    Raises:
      DataError: it cannot be read.
    """
    try:
        with read_whole(path):
            yield from READERS[suffix_of(path)](path, field)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{path} cannot be read: {shown(str(error))}; give whole files of rows, "
            "in UTF-8"
        ) from error


def suffix_of(path: pathlib.Path) -> str:
    """The suffix that says how to read a file, such as ".jsonl" of "a.jsonl.gz"."""
    return pathlib.PurePath(path.name.lower().removesuffix(".gz")).suffix


def _open(path: pathlib.Path, mode: str, **how: str) -> IO[Any]:
    is_zipped = path.name.lower().endswith(".gz")
    return gzip.open(path, mode, **how) if is_zipped else open(path, mode, **how)


def _json_rows(path: pathlib.Path, _: str) -> Rows:
    with _open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{path}, {place}: {shown(repr(line))} is not JSON ({error}); "
                    "write one object in each line, as jq -c '.[]' does with a list"
                ) from error
            if not isinstance(row, dict):
                raise DataError(
                    f"{path}, {place}: {shown(json.dumps(row))} is not an object; "
                    'write one in each line, such as {"text": "..."}'
                )
            yield place, row


def _parquet_rows(path: pathlib.Path, field: str) -> Rows:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            f"{path}: parquet is read with the package pyarrow, which is not "
            "installed; install pyarrow, or convert the file to JSON lines"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            _check_field(str(path), field, dict.fromkeys(file.schema_arrow.names))
            number = 0
            for batch in file.iter_batches(columns=[field]):
                for text in batch.column(field).to_pylist():
                    number += 1
                    yield f"row {number}", {field: text}
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{path} cannot be read as parquet: {shown(str(error))}; write it again"
        ) from error


def _csv_rows(path: pathlib.Path, field: str) -> Rows:
    delimiter = "\t" if suffix_of(path) == ".tsv" else ","
    before = csv.field_size_limit(_LONGEST)
    try:
        with _open(path, "rt", encoding="utf-8-sig", newline="") as lines:
            table = csv.DictReader(lines, delimiter=delimiter, strict=True)
            if table.fieldnames:
                _check_field(str(path), field, dict.fromkeys(table.fieldnames))
            for row in table:
                place = f"line {table.line_num}"
                if None in row or None in row.values():
                    raise DataError(
                        f"{path}, {place}: the row has not as many columns as the "
                        f"first line, {len(table.fieldnames)}; put texts that hold "
                        f"{delimiter!r} in quotes"
                    )
                yield place, row
    finally:
        csv.field_size_limit(before)


READERS: dict[str, Callable[[pathlib.Path, str], Rows]] = {
    ".jsonl": _json_rows,
    ".ndjson": _json_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
}
"""{suffix: (path, field) -> rows} of files of rows."""
