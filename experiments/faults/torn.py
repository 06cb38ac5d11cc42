"""Damaged files, as a crash of a machine or a bad disk leaves them."""

import json
import os
import pathlib
import random
from collections.abc import Callable

from meshpar.runs.metrics import METRICS

_NOISE = 64


def cut(file: pathlib.Path, draw: random.Random) -> None:
    """Cuts the end off."""
    os.truncate(file, draw.randrange(file.stat().st_size))


def flip(file: pathlib.Path, draw: random.Random) -> None:
    """Flips one bit."""
    with file.open("r+b") as opened:
        place = draw.randrange(file.stat().st_size)
        opened.seek(place)
        byte = opened.read(1)[0] ^ (1 << draw.randrange(8))
        opened.seek(place)
        opened.write(bytes([byte]))


def remove(file: pathlib.Path, draw: random.Random) -> None:
    """Removes the file."""
    file.unlink()


def _steps(folder: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
    """(step, folder) of the complete checkpoints in a folder, ascending."""
    found = [(path.name.partition("-")[0], path) for path in folder.glob("*")]
    return sorted((int(step), path) for step, path in found if step.isdigit())


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of a checkpoint that hold something."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(file for file in files if file.stat().st_size)


def _newest_file(
    steps: list[tuple[int, pathlib.Path]], draw: random.Random
) -> pathlib.Path:
    """A file of the newest checkpoint that has any; a kill leaves some without."""
    return draw.choice([found for _, path in steps if (found := _files(path))][-1])


def _shared(folder: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
    return _steps(folder / "run" / "checkpoints")


def _local(folder: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
    return sorted(s for run in (folder / "disk").glob("*") for s in _steps(run))


def _tear_metrics(folder: pathlib.Path, draw: random.Random) -> None:
    """Cuts the newest rows, or writes noise after them.

    Rows up to that of the newest checkpoint are on the disk before the checkpoint is,
    so a crash cannot take them.
    """
    file = folder / "run" / METRICS
    data = file.read_bytes()
    newest = max((step for step, _ in _shared(folder) + _local(folder)), default=0)
    with file.open("r+b") as opened:
        opened.truncate(draw.randint(_length_up_to(data, newest), len(data)))
        opened.seek(0, os.SEEK_END)
        if draw.random() < 0.5:
            opened.write(draw.choice((bytes(_NOISE), draw.randbytes(_NOISE))))


def _length_up_to(data: bytes, step: int) -> int:
    """Bytes up to the end of the last row with the loss of a step."""
    end = place = 0
    for line in data.splitlines(keepends=True):
        place += len(line)
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("step") == step and "loss" in row:
            end = place
    return end


Damage = Callable[[pathlib.Path, random.Random], None]
"""`cut`, `flip` or `remove`."""


def choose(
    folder: pathlib.Path, damage: Damage, draw: random.Random
) -> Callable[[], None] | None:
    """A damage to a file of a run that is down; None if it has no file yet.

    The newest of at least two shared checkpoints or the newest local one; metrics can
    be cut.

    Args:
      folder: holds the run's folder `run`, and its local disk `disk`.
      damage: what is done to the file.
      draw: chooses the file and the place.
    """
    tears: list[Callable[[], None]] = []
    if len(_shared(folder)) > 1:
        tears.append(lambda: damage(_newest_file(_shared(folder), draw), draw))
    if any(_files(path) for _, path in _local(folder)):
        tears.append(lambda: damage(_newest_file(_local(folder), draw), draw))
    if damage is cut and (folder / "run" / METRICS).exists():
        tears.append(lambda: _tear_metrics(folder, draw))
    return draw.choice(tears) if tears else None
