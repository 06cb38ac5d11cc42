"""The local tier of checkpoints: each process keeps its own shards on its own disk.

Local checkpoints are quick and may be frequent; the persistent tier backs them. After a
restart the processes compare which boxes of which step their disks hold. A step is
complete if the disks together hold all of it: a process that lacks a box, because its
machine was replaced or its file is corrupt, receives the box from a peer. A box names
its place in the whole tensor, so the layout and the number of processes may change.

Orbax does not fit here: its emergency checkpoints need the same mesh and a replica axis
in it, and its other formats are finalized by one process, which cannot see the other
machines' disks.

A file is a zip of numpy arrays, whose checksums are verified by reading; it is renamed
into place when it is complete.
"""

import concurrent.futures
import functools
import json
import logging
import math
import os
import pathlib
import re
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshpar.arrays import leaves_by_path
from meshpar.checkpoint.boxes import Box, assemble_shard, complete_boxes
from meshpar.checkpoint.disk_space import check_writable, lack_of_space
from meshpar.checkpoint.peers import Entry, load_boxes, receive_boxes
from meshpar.checkpoint.read_problems import Problems, warn_once
from meshpar.checkpoint.tier import Tier
from meshpar.errors import CheckpointError
from meshpar.multihost.agree import allgather_objects

_KEEP = 2
"""Steps kept beside the one being written: another process may still be writing the
last of them."""
_NAME = re.compile(r"(\d+)-\d+")
"""STEP-START; other folders are not ours, and are neither read nor deleted."""
_RUN_ID = re.compile(r"[0-9a-f]{32}")
"""Names a folder beside those of other runs, and none elsewhere."""
_BOXES = "pieces"
"""Key of the boxes in a file's index; files of earlier versions have it, too."""

_NAMES = "local_folder", "--checkpoint_local_dir"
"""Names of the folder: of an argument, and of the flag of a command."""


def _raw(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def _shard_indices(leaf: jax.ShapeDtypeStruct) -> list[tuple[slice, ...]]:
    """The index of the shard of every device of this process."""
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    return list(indices.values())


def _num_bytes_here(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of a leaf's distinct shards on this process."""
    shard = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return shard * len({str(index) for index in _shard_indices(leaf)})


class LocalTier(Tier):
    """The files of one run on the disk of this machine: STEP-START/PROCESS.npz.

    A checkpoint's name holds its step and the start of the run that wrote it, so that
    boxes of two starts, whose weights may differ, are never combined.
    """

    persistent = False

    def __init__(self, folder: pathlib.Path, start: str):
        """Opens a folder that belongs to one run; processes of a machine may share it.

        Args:
          folder: made if it is missing.
          start: names this start of the run, the same on all processes; names of later
            starts sort after it.
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
        """Opens a run's sub-folder of a folder; all processes call it.

        The sub-folder is named by an id that is stored in the run's own folder together
        with that folder's path, so a new run or a copy of a run starts empty.

        Args:
          local: on the disk of each machine; runs may share it.
          run: the run's own folder; only process 0 has to see it.
          abstract: the leaves that will be saved, with shardings.

        Raises:
          CheckpointError: the folder cannot be written to.
        """
        local, id_and_start = pathlib.Path(local).absolute(), None
        check_writable(local, *_NAMES)
        if problem := lack_of_space(local, sum(map(_num_bytes_here, abstract))):
            logging.warning("%s", problem)
        if jax.process_index() == 0:
            id_and_start = _run_id(run), f"{time.time_ns():020d}"
        run_id, start = allgather_objects("run id", id_and_start)[0]
        check_writable(local / run_id, *_NAMES)
        return cls(local / run_id, start)

    def _on_this_disk(self) -> list[tuple[int, str]]:
        """(step, name) of the checkpoints with files on this disk, ascending."""
        names = {file.parent.name for file in self._folder.glob("*-*/*.npz")}
        matches = [match for name in names if (match := _NAME.fullmatch(name))]
        return sorted((int(match[1]), match[0]) for match in matches)

    def checkpoints(self) -> list[tuple[int, str]]:
        """(step, name) of the checkpoints with files on any disk, ascending."""
        disks = allgather_objects("local checkpoints", self._on_this_disk())
        return sorted({(step, name) for disk in disks.values() for step, name in disk})

    # Writing.

    def save(self, step: int, state: Any, extra: Any, metadata: dict[str, Any]) -> None:
        """Copies this process's shards to the host and starts writing them."""
        self.wait()
        arrays = {}
        for path, leaf in leaves_by_path((state, extra)).items():
            for shard in leaf.addressable_shards:
                box = str(Box.at(path, shard.index, leaf.shape))
                if box not in arrays:
                    arrays[box] = np.array(shard.data)  # The next step donates it.
        name = f"{step}-{self._start}"
        self._writing = self._writer.submit(self._write, name, arrays, metadata)

    def _write(
        self, name: str, arrays: Mapping[str, np.ndarray], metadata: dict[str, Any]
    ) -> None:
        for _, old in self._on_this_disk()[:-_KEEP]:
            shutil.rmtree(self._folder / old, ignore_errors=True)
        index = json.dumps({"metadata": metadata, _BOXES: list(arrays)}).encode()
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
        """Waits for the last write; a failed write is only a warning."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except OSError as error:
            logging.warning(
                "no local checkpoint was written to %s (%s); the checkpoints in the "
                "run's own folder do not depend on it",
                self._folder,
                error,
            )

    def reject(self, name: str, problems: Problems) -> None:
        """Logs why a checkpoint cannot be read; `discard_after` deletes it."""
        logging.warning(
            "local checkpoint %s cannot be read; the one before it is used: %s",
            name,
            problems,
        )

    def discard_after(self, step: int) -> None:
        """Deletes the checkpoints of later steps than the one the run resumes from."""
        for later, name in self._on_this_disk():
            if later > step:
                shutil.rmtree(self._folder / name, ignore_errors=True)
        allgather_objects("discarded", step)

    def close(self) -> None:
        """Waits for the last write."""
        self.wait()
        self._writer.shutdown()

    # Reading.

    def _indices(self, name: str) -> dict[pathlib.Path, dict[str, Any]]:
        """{file: its index} of a checkpoint; logs and omits files that fail to read."""
        indices = {}
        for file in sorted((self._folder / name).glob("*.npz")):
            try:
                with (
                    file.open("rb") as opened,
                    np.load(opened, allow_pickle=False) as entries,
                ):
                    indices[file] = json.loads(entries["index"].tobytes())
            except Exception as error:  # Torn bytes may raise anything.
                warn_once(f"{file} cannot be read, left out: {error}")
        return indices

    def metadata(self, name: str) -> dict[str, Any]:
        """The metadata of a checkpoint, from any process that can read it.

        Raises:
          CheckpointError: no process can read it.
        """
        own = next(iter(self._indices(name).values()), {}).get("metadata")
        gathered = allgather_objects("local metadata", own).values()
        readable = [metadata for metadata in gathered if metadata is not None]
        if not readable:
            raise CheckpointError(f"no local file of {name} can be read")
        return readable[0]

    def read(self, name: str, state: Any, extra: Any) -> tuple[Any, Any]:
        """Reads this process's shards, from its own disk where possible.

        Args:
          name: the checkpoint's, from `checkpoints`.
          state: ShapeDtypeStructs with shardings.
          extra: ShapeDtypeStructs with shardings, or None to leave it out.

        Raises:
          CheckpointError: the processes together do not hold all of it.
        """
        leaves = leaves_by_path((state, extra))
        on_disk = {
            Box.parse(text): Entry(file, str(number))
            for file, index in self._indices(name).items()
            for number, text in enumerate(index[_BOXES])
        }
        held = allgather_objects("local boxes", list(map(str, on_disk)))
        boxes = complete_boxes(held, leaves, name)
        shards = [
            Box.at(path, index, leaf.shape)
            for path, leaf in leaves.items()
            for index in _shard_indices(leaf)
        ]
        needed = {box for box in boxes if any(map(box.overlaps, shards))}
        contents = load_boxes({box: on_disk[box] for box in needed if box in on_disk})
        contents |= receive_boxes(needed - contents.keys(), on_disk, leaves)

        def array(path: str, leaf: Any) -> jax.Array:
            leaf_contents = {
                box: raw.view(leaf.dtype).reshape(box.shape)
                for box, raw in contents.items()
                if box.leaf == path
            }
            shard = functools.partial(assemble_shard, path, leaf, leaf_contents)
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)

        arrays = [array(path, leaf) for path, leaf in leaves.items()]
        return jax.tree.unflatten(jax.tree.structure((state, extra)), arrays)


def _run_id(run: pathlib.Path) -> str:
    """The id of a run's folder; a new one if it has none or is a copy."""
    file = run / "run_id"
    lines = file.read_text().split("\n") if file.exists() else []
    if lines[1:2] != [str(run)] or not _RUN_ID.fullmatch(lines[0]):
        lines = [uuid.uuid4().hex, str(run)]
        partial = file.with_suffix(".partial")
        partial.write_text("\n".join(lines))
        os.replace(partial, file)
    return lines[0]
