"""The local tier of checkpoints: each process keeps its own shards on its own disk.

It is quick and may be frequent; the durable tier stays behind it. After a restart the
processes tell each other which pieces of which step their disks hold. A step is
complete if together they hold all of it: whoever lacks a piece, because its machine was
replaced or its file is corrupt, gets it from a peer. Pieces are known by their place in
the whole tensor, so the layout and the number of processes may change.

Orbax's emergency checkpoints want the same mesh again and an axis of replicas in it;
its other formats are put together by one process, which cannot see the others' disks.

A file is a zip of numpy arrays, whose checksums are tested as they are read; it is
renamed into place when it is complete.
"""

import concurrent.futures
import functools
import itertools
import json
import logging
import math
import os
import pathlib
import shutil
import zipfile
import zlib
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from meshpar import multihost
from meshpar.errors import CheckpointError
from meshpar.pieces import Piece, assembled, complete, leaves

_KEEP = 3
"""Steps that stay: one process may still write the second last, and lack the last."""

_UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


def _group(state: Mapping[str, Any]) -> str:
    """Names how a state was split: pieces of two ways are not mixed."""
    said = [(str(leaf.sharding), leaf.shape) for leaf in state.values()]
    return f"{zlib.crc32(repr((said, jax.process_count())).encode()):08x}"


def _raw(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


class LocalDisk:
    """The files of one run on the disk of this machine: STEP-GROUP/PROCESS.npz."""

    def __init__(self, folder: pathlib.Path):
        """Opens a folder of this run alone; processes of one machine may share it."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "local-checkpoint")
        self._writing: concurrent.futures.Future | None = None

    def _folders(self) -> list[tuple[int, pathlib.Path]]:
        """Every step here and its folder, ascending."""
        found = self._folder.glob("*-*")
        return sorted((int(path.name.partition("-")[0]), path) for path in found)

    def steps(self) -> list[int]:
        """Steps of which any process has a file, ascending; all processes call it."""
        everyone = multihost.exchange([step for step, _ in self._folders()])
        return sorted({step for steps in everyone.values() for step in steps})

    # Writing.

    def save(self, step: int, state: Any, extra: Any, metadata: dict) -> None:
        """Copies this process's shards to the host and starts writing them."""
        self.wait()
        state_leaves, arrays = leaves((state, extra)), {}
        for path, leaf in state_leaves.items():
            for shard in leaf.addressable_shards:
                piece = str(Piece.at(path, shard.index, leaf.shape))
                if piece not in arrays:
                    arrays[piece] = np.array(shard.data)  # The step donates its own.
        name = f"{step}-{_group(state_leaves)}"
        self._writing = self._writer.submit(self._write, name, arrays, metadata)

    def _write(self, name: str, arrays: Mapping[str, np.ndarray], about: dict) -> None:
        index = json.dumps({"metadata": about, "pieces": list(arrays)}).encode()
        entries = {str(n): _raw(x) for n, x in enumerate(arrays.values())}
        entries["index"] = np.frombuffer(index, np.uint8)
        file = self._folder / name / f"{jax.process_index()}.npz"
        file.parent.mkdir(exist_ok=True)
        with (partial := file.with_suffix(".partial")).open("wb") as out:
            np.savez(out, **entries)
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, file)
        for _, old in self._folders()[:-_KEEP]:
            shutil.rmtree(old, ignore_errors=True)

    def wait(self) -> None:
        """Waits for the last write; a failed one is a warning, not the run's end."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except OSError as error:
            logging.warning(
                "no local checkpoint was written to %s (%s); those in the run's own "
                "folder are not touched by this",
                self._folder,
                error,
            )

    def forget_after(self, step: int) -> None:
        """Deletes what the run did not go on from; all processes call it."""
        for later, path in self._folders():
            if later > step:
                shutil.rmtree(path, ignore_errors=True)
        multihost.exchange("")

    def close(self) -> None:
        """Waits for the last write."""
        self.wait()
        self._writer.shutdown()

    # Reading.

    def _indices(self, step: int) -> dict[pathlib.Path, dict[str, Any]]:
        """{file: its index} of a step; a file that cannot be read is named."""
        found = {}
        for number, path in self._folders():
            for file in sorted(path.glob("*.npz")) if number == step else ():
                try:
                    with file.open("rb") as opened, np.load(opened) as entries:
                        found[file] = json.loads(entries["index"].tobytes())
                except _UNREADABLE as error:
                    logging.warning("%s cannot be read, left out: %s", file, error)
        return found

    def metadata(self, step: int) -> dict[str, Any]:
        """What was saved beside the state; all processes call it.

        Raises:
          CheckpointError: no process can read it.
        """
        mine = next(iter(self._indices(step).values()), {}).get("metadata")
        found = [one for one in multihost.exchange(mine).values() if one is not None]
        if not found:
            raise CheckpointError(f"no local file of step {step} can be read")
        return found[0]

    def read(self, step: int, state: Any, extra: Any) -> tuple[Any, Any]:
        """Reads a step, with what is missing here from peers; all processes call it.

        Args:
          step: the step.
          state: ShapeDtypeStructs with shardings.
          extra: likewise, or None to leave it out.

        Raises:
          CheckpointError: together the processes do not hold all of it.
        """
        wanted, files = leaves((state, extra)), self._pieces(step)
        said = {name: list(map(str, group)) for name, group in files.items()}
        everyone = multihost.exchange(said)
        name, pieces = complete(everyone, wanted, step)
        boxes = [
            Piece.at(path, index, leaf.shape)
            for path, leaf in wanted.items()
            for index in leaf.sharding.addressable_devices_indices_map(
                leaf.shape
            ).values()
        ]
        needed = {p for p in pieces for box in boxes if p.overlaps(box)}
        mine = files.get(name, {})
        here = _loaded({piece: mine[piece] for piece in needed if piece in mine})
        lacking = needed - here.keys()
        claims = {process: groups.get(name, []) for process, groups in everyone.items()}
        here |= _from_peers(step, lacking, mine, claims, wanted)

        def made(path: str, leaf: Any) -> jax.Array:
            parts = {
                piece: raw.view(leaf.dtype).reshape(piece.shape)
                for piece, raw in here.items()
                if piece.leaf == path
            }
            shard = functools.partial(assembled, path, leaf, parts)
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)

        arrays = [made(path, leaf) for path, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure((state, extra)), arrays)

    def _pieces(self, step: int) -> dict[str, dict[Piece, tuple[pathlib.Path, str]]]:
        """{group: {piece: (file, entry)}} of a step on this disk."""
        found: dict[str, dict] = {}
        for file, index in self._indices(step).items():
            group = found.setdefault(file.parent.name, {})
            for number, text in enumerate(index["pieces"]):
                group[Piece.parse(text)] = file, str(number)
        return found


def _loaded(
    places: Mapping[Piece, tuple[pathlib.Path, str]],
) -> dict[Piece, np.ndarray]:
    """The bytes of pieces; one that cannot be read is named and left out."""
    found, by_file = {}, sorted(places.items(), key=lambda item: str(item[1][0]))
    for file, group in itertools.groupby(by_file, key=lambda item: item[1][0]):
        for piece, (_, number) in group:
            try:
                with file.open("rb") as opened, np.load(opened) as entries:
                    found[piece] = entries[number]
            except _UNREADABLE as error:
                logging.warning("%s: %s cannot be read: %s", file, piece, error)
    return found


def _from_peers(
    step: int,
    lacking: Collection[Piece],
    mine: Mapping[Piece, tuple[pathlib.Path, str]],
    claims: Mapping[int, Collection[str]],
    wanted: Mapping[str, Any],
) -> dict[Piece, np.ndarray]:
    """The bytes of pieces that other processes hold; all processes call it.

    Args:
      step: the step.
      lacking: what this process needs and cannot read.
      mine: what lies on its disk.
      claims: what every process says that it has.
      wanted: the leaves.

    Raises:
      CheckpointError: nobody can read a piece.
    """
    got, unreadable = {}, []
    asked = multihost.exchange(sorted(map(str, lacking)))
    for text in sorted({text for texts in asked.values() for text in texts}):
        holders = [
            p for p, has in claims.items() if text in has and text not in asked[p]
        ]
        piece = Piece.parse(text)
        size = math.prod(piece.shape) * wanted[piece.leaf].dtype.itemsize
        value = None
        if holders and holders[0] == jax.process_index():
            value = _loaded({piece: mine[piece]}).get(piece)
        if not holders or (holders[0] == jax.process_index() and value is None):
            unreadable.append(text)
        if holders:
            value = np.zeros(size, np.uint8) if value is None else value
            value = multihost.broadcast(value, holders[0])
        if piece in lacking:
            got[piece] = value
    if bad := {
        text for texts in multihost.exchange(unreadable).values() for text in texts
    }:
        raise CheckpointError(f"no process can read {sorted(bad)[0]} of step {step}")
    return got
