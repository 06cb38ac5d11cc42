"""The local tier of checkpoints: each process keeps its own shards on its own disk.

It is quick and may be frequent; the persistent tier stays behind it. After a restart
the processes tell each other which pieces of which step their disks hold. A step is
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
import json
import logging
import math
import os
import pathlib
import shutil
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshpar.checkpoint.boxes import Box, assemble_shard, complete_boxes, leaves_by_path
from meshpar.checkpoint.disk_space import check_writable, lack_of_space
from meshpar.errors import CheckpointError
from meshpar.multihost.agree import READ_S, allgather_objects, broadcast

_KEEP = 2
"""Steps that stay beside the one being written: another process may still be writing
the last of them."""


def _raw(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


class LocalTier:
    """The files of one run on the disk of this machine: STEP-START/PROCESS.npz.

    A checkpoint is named by its step and the start of the run that wrote it, so that
    pieces of two branches of a run are never put together.
    """

    def __init__(self, folder: pathlib.Path, start: str):
        """Opens a folder of this run alone; processes of one machine may share it.

        Args:
          folder: made if it is missing.
          start: names this start of the run, the same on all processes; later starts
            come later in the alphabet.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._start = folder, start
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "local-checkpoint")
        self._writing: concurrent.futures.Future | None = None

    @classmethod
    def open(
        cls,
        local: str | os.PathLike,
        run: pathlib.Path,
        abstract: Sequence[jax.ShapeDtypeStruct],
    ) -> "LocalTier":
        """Opens what a run keeps in a folder; all processes call it.

        A new run does not find the files of another, nor does a copy of its folder.

        Args:
          local: on the disk of each machine, for runs to share.
          run: the run's own folder, seen by process 0, which remembers an id there.
          abstract: what will be saved, with shardings.

        Raises:
          CheckpointError: the folder cannot be written to.
        """
        local, told = pathlib.Path(local).absolute(), None
        check_writable(local, "--checkpoint_local_dir")
        if problem := lack_of_space(local, sum(map(_bytes_here, abstract))):
            logging.warning("%s", problem)
        if jax.process_index() == 0:
            file = run / "run_id"
            known = file.read_text().split("\n") if file.exists() else []
            if known[1:2] != [str(run)]:
                known = [uuid.uuid4().hex, str(run)]
                partial = file.with_suffix(".partial")
                partial.write_text("\n".join(known))
                os.replace(partial, file)
            told = known[0], f"{time.time_ns():020d}"
        identity, start = allgather_objects("run id", told)[0]
        return cls(local / identity, start)

    def _here(self) -> list[tuple[int, str]]:
        """(step, name) of what has files on this disk, ascending."""
        found = {file.parent.name for file in self._folder.glob("*-*/*.npz")}
        return sorted((int(name.partition("-")[0]), name) for name in found)

    def checkpoints(self) -> list[tuple[int, str]]:
        """(step, name) of what any process has files of, ascending.

        All processes call it.
        """
        everyone = allgather_objects("local checkpoints", self._here())
        return sorted({(step, name) for one in everyone.values() for step, name in one})

    # Writing.

    def save(self, step: int, state: Any, extra: Any, metadata: dict) -> None:
        """Copies this process's shards to the host and starts writing them."""
        self.wait()
        arrays = {}
        for path, leaf in leaves_by_path((state, extra)).items():
            for shard in leaf.addressable_shards:
                piece = str(Box.at(path, shard.index, leaf.shape))
                if piece not in arrays:
                    arrays[piece] = np.array(shard.data)  # The step donates its own.
        name = f"{step}-{self._start}"
        self._writing = self._writer.submit(self._write, name, arrays, metadata)

    def _write(self, name: str, arrays: Mapping[str, np.ndarray], about: dict) -> None:
        for _, old in self._here()[:-_KEEP]:
            shutil.rmtree(self._folder / old, ignore_errors=True)
        index = json.dumps({"metadata": about, "pieces": list(arrays)}).encode()
        entries = {str(n): _raw(x) for n, x in enumerate(arrays.values())}
        entries["index"] = np.frombuffer(index, np.uint8)
        file = self._folder / name / f"{jax.process_index()}.npz"
        file.parent.mkdir(exist_ok=True)
        partial = file.with_suffix(".partial")
        try:
            with partial.open("wb") as out:
                np.savez(out, **entries)
                out.flush()
                os.fsync(out.fileno())
            os.replace(partial, file)
        finally:
            partial.unlink(missing_ok=True)

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
        for later, name in self._here():
            if later > step:
                shutil.rmtree(self._folder / name, ignore_errors=True)
        allgather_objects("forgotten", step)

    def close(self) -> None:
        """Waits for the last write."""
        self.wait()
        self._writer.shutdown()

    # Reading.

    def _indices(self, name: str) -> dict[pathlib.Path, dict[str, Any]]:
        """{file: its index} of a checkpoint; a file that cannot be read is named."""
        found = {}
        for file in sorted((self._folder / name).glob("*.npz")):
            try:
                with file.open("rb") as opened, np.load(opened) as entries:
                    found[file] = json.loads(entries["index"].tobytes())
            except Exception as error:  # Whatever torn bytes lead to.
                logging.warning("%s cannot be read, left out: %s", file, error)
        return found

    def metadata(self, name: str) -> dict[str, Any]:
        """What was saved beside the state; all processes call it.

        Raises:
          CheckpointError: no process can read it.
        """
        mine = next(iter(self._indices(name).values()), {}).get("metadata")
        everyone = allgather_objects("local metadata", mine)
        found = [one for one in everyone.values() if one is not None]
        if not found:
            raise CheckpointError(f"no local file of {name} can be read")
        return found[0]

    def read(self, name: str, state: Any, extra: Any) -> tuple[Any, Any]:
        """Reads a checkpoint, what is missing here from peers; all processes call it.

        Args:
          name: as in `checkpoints`.
          state: ShapeDtypeStructs with shardings.
          extra: likewise, or None to leave it out.

        Raises:
          CheckpointError: together the processes do not hold all of it.
        """
        wanted = leaves_by_path((state, extra))
        mine = {
            Box.parse(text): (file, str(number))
            for file, index in self._indices(name).items()
            for number, text in enumerate(index["pieces"])
        }
        claims = allgather_objects("local pieces", list(map(str, mine)))
        pieces = complete_boxes(claims, wanted, name)
        boxes = [
            Box.at(path, index, leaf.shape)
            for path, leaf in wanted.items()
            for index in leaf.sharding.addressable_devices_indices_map(
                leaf.shape
            ).values()
        ]
        needed = {p for p in pieces for box in boxes if p.overlaps(box)}
        here = _loaded({piece: mine[piece] for piece in needed if piece in mine})
        here |= _from_peers(needed - here.keys(), mine, wanted)

        def made(path: str, leaf: Any) -> jax.Array:
            parts = {
                piece: raw.view(leaf.dtype).reshape(piece.shape)
                for piece, raw in here.items()
                if piece.leaf == path
            }
            shard = functools.partial(assemble_shard, path, leaf, parts)
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)

        arrays = [made(path, leaf) for path, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure((state, extra)), arrays)


def _bytes_here(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of the different shards of a leaf on this process."""
    where = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    shard = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return shard * len({str(index) for index in where.values()})


def _loaded(
    places: Mapping[Box, tuple[pathlib.Path, str]],
) -> dict[Box, np.ndarray]:
    """The bytes of pieces; one that cannot be read is named and left out."""
    found = {}
    for piece, (file, number) in places.items():
        try:
            with file.open("rb") as opened, np.load(opened) as entries:
                found[piece] = entries[number]
        except Exception as error:  # Whatever torn bytes lead to.
            logging.warning("%s: %s cannot be read: %s", file, piece, error)
    return found


def _from_peers(
    lacking: Collection[Box],
    mine: Mapping[Box, tuple[pathlib.Path, str]],
    wanted: Mapping[str, Any],
) -> dict[Box, np.ndarray]:
    """The bytes of pieces that other processes hold; all processes call it.

    Args:
      lacking: what this process needs and cannot read.
      mine: what lies on its disk.
      wanted: the leaves.

    Raises:
      CheckpointError: nobody can read a piece.
    """
    asked = allgather_objects("pieces asked", sorted(map(str, lacking)), READ_S)
    texts = sorted({text for one in asked.values() for text in one})
    pieces = {text: Box.parse(text) for text in texts}
    give = _loaded({p: mine[p] for p in pieces.values() if p in mine})
    holders = allgather_objects("pieces given", list(map(str, give)), READ_S)
    got = {}
    for text, piece in pieces.items():
        source = next((p for p, has in holders.items() if text in has), None)
        if source is None:
            raise CheckpointError(f"no process can read {text}")
        size = math.prod(piece.shape) * wanted[piece.leaf].dtype.itemsize
        value = give.get(piece, np.zeros(size, np.uint8))
        value = broadcast(value, source)
        if piece in lacking:
            got[piece] = value
    return got
