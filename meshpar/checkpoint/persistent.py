"""The persistent tier of checkpoints: one folder that all processes see, by orbax.

Orbax writes asynchronously and renames a checkpoint into place when it is complete, so
a checkpoint is complete or invisible. It does not depend on the layout.
"""

import contextlib
import json
import logging
import os
import pathlib
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from meshpar.arrays import leaves_by_path
from meshpar.checkpoint.background_errors import quiet
from meshpar.checkpoint.checksums import json_checksum
from meshpar.checkpoint.disk_space import check_writable, lack_of_space
from meshpar.checkpoint.failed_writes import FailedWrites, WriteFailedError
from meshpar.checkpoint.mode_identity import EXTRA
from meshpar.checkpoint.random_keys import without_keys
from meshpar.checkpoint.read_problems import Kind, Problems
from meshpar.checkpoint.tier import Tier
from meshpar.checkpoint.write_problems import check_present, failed_write
from meshpar.errors import CheckpointError, MeshparError, shown
from meshpar.lowering.replicas import with_replicas
from meshpar.lowering.state import TrainState
from meshpar.multihost.agree import allgather_objects

STATE, METADATA = "state", "metadata"
TENSORS, REPLICAS, _CHECKSUM = "tensors", "replicas", "checksum"

BLOCK_BYTES = 2**25
"""Bytes of a block of an array on disk, at most: a reader needs one in memory."""

PART_BYTES = 2**16
"""Least bytes of a part: replicas share the writing of arrays whose parts have them.

Of other arrays one replica writes all: parts are cut by programs, one for each shape.
"""


def shapes_and_dtypes(state: Any) -> dict[str, list]:
    """{key path: [shape, dtype]} of a state; equal for equal models and optimizers."""
    return {
        path: [list(leaf.shape), str(leaf.dtype)]
        for path, leaf in leaves_by_path(state).items()
    }


def first_difference(own: dict[str, list], saved: dict[str, list]) -> str:
    """The first tensor in which a run and a checkpoint differ; "" if none does."""
    for path in {**own, **saved}:
        in_run, in_checkpoint = own.get(path, "missing"), saved.get(path, "missing")
        if in_run != in_checkpoint:
            return (
                f"{path} is {in_checkpoint} in the checkpoint and {in_run} in the run"
            )
    return ""


class StoredCheckpoint(NamedTuple):
    """One checkpoint in a folder, as a program without devices sees it.

    Attributes:
      step: its step.
      path: its folder.
      num_bytes: bytes on disk.
      metadata: the metadata saved with it; None if it cannot be read.
      problem: why it cannot be used; "" if it is complete.
    """

    step: int
    path: pathlib.Path
    num_bytes: int
    metadata: dict[str, Any] | None
    problem: str


def find_checkpoints(folder: str | os.PathLike) -> list[StoredCheckpoint]:
    """The checkpoints in a folder by step, including incomplete ones.

    Args:
      folder: the folder given to `Checkpoints`.
    """
    checkpoints = []
    for path in pathlib.Path(folder).glob("*"):
        step = path.name.partition(".")[0]
        if not step.isdecimal() or not path.is_dir():
            continue
        metadata, problem, size = None, "", 0
        for file in path.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # A run may be writing.
                size += file.stat().st_size if file.is_file() else 0
        try:
            metadata = _read_metadata(path)
        except (OSError, ValueError, RecursionError) as error:
            problem = f"its metadata cannot be read: {shown(str(error))}"
        if "." in path.name:
            problem = "incomplete: not written to its end"
        elif not (path / STATE).is_dir():
            problem = "its state is missing"
        checkpoints.append(StoredCheckpoint(int(step), path, size, metadata, problem))
    return sorted(checkpoints)


def reason_not_restorable(
    checkpoint: StoredCheckpoint, abstract_state: TrainState, num_replicas: int = 1
) -> str:
    """A reason why a checkpoint cannot be restored to a state; "" if it can.

    Args:
      checkpoint: from `find_checkpoints`.
      abstract_state: shapes, dtypes and shardings to restore to.
      num_replicas: replicas of that state.
    """
    if checkpoint.problem:
        return checkpoint.problem
    if not isinstance(checkpoint.metadata.get(TENSORS), dict):
        return "its metadata does not list its tensors"
    saved_replicas = checkpoint.metadata.get(REPLICAS, 1)
    if saved_replicas != num_replicas:
        abstract_state = with_replicas(abstract_state, num_replicas, saved_replicas)
    own = shapes_and_dtypes(without_keys(abstract_state))
    return first_difference(own, checkpoint.metadata[TENSORS])


def _check_inside(path: pathlib.Path) -> None:
    """Raises ValueError for a checkpoint of which a link leads out of its folder.

    Args:
      path: its folder; what leads to the folder may be a link.
    """
    folder = path.resolve()
    for file in folder.rglob("*"):
        if file.is_symlink() and not file.resolve().is_relative_to(folder):
            raise ValueError(
                f"{file.relative_to(folder)} is a link out of the checkpoint, which "
                "has to hold its own files; copy them into it (cp -rL)"
            )


def _read_metadata(path: pathlib.Path) -> dict[str, Any]:
    """The metadata of a checkpoint's folder.

    Raises:
      OSError, ValueError: it cannot be read, or has changed since it was written.
    """
    _check_inside(path)
    metadata = json.loads((path / METADATA / METADATA).read_text())
    if not isinstance(metadata, dict):
        raise ValueError(f"its metadata is a {type(metadata).__name__}, not a table")
    checksum = metadata.pop(_CHECKSUM, None)  # Missing in the first format.
    if checksum not in (None, json_checksum(metadata)):
        raise ValueError("its metadata has changed since it was written")
    return metadata


def write_metadata(path: pathlib.Path, metadata: dict[str, Any]) -> None:
    """Writes the metadata of a checkpoint's folder, as orbax does."""
    (path / METADATA).mkdir()
    text = json.dumps({**metadata, _CHECKSUM: json_checksum(metadata)})
    (path / METADATA / METADATA).write_text(text)


def read_checkpoint(path: pathlib.Path, state: Any, extra: Any) -> tuple[Any, Any]:
    """Reads this process's shards of a checkpoint, independently of other processes.

    Args:
      path: its folder.
      state: ShapeDtypeStructs with shardings.
      extra: ShapeDtypeStructs with shardings, or None to leave it out.

    Returns:
      (state, extra).

    Raises:
      Exception: it cannot be read.
    """
    process = jax.process_index()
    # Orbax's default is a barrier, which would wait for a process that has failed.
    independent = ocp.options.MultiprocessingOptions(
        primary_host=process,
        active_processes={process},
        barrier_sync_key_prefix=f"alone-{process}",
    )
    reader = ocp.Checkpointer(
        ocp.StandardCheckpointHandler(multiprocessing_options=independent),
        multiprocessing_options=independent,
    )

    def item(name: str, abstract: Any) -> Any:
        return reader.restore(path / name, args=ocp.args.StandardRestore(abstract))

    with contextlib.closing(reader):
        return item(STATE, state), None if extra is None else item(EXTRA, extra)


def _writer() -> ocp.PyTreeCheckpointHandler:
    """A handler for trees of arrays; of a large array each replica writes a part."""
    arrays = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=PART_BYTES
    )
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


class PersistentTier(Tier):
    """The checkpoints in one folder, which all processes see."""

    persistent = True

    def __init__(self, folder: pathlib.Path, keep: int, num_bytes: int):
        """Opens a folder.

        Args:
          folder: holds one sub-folder per step; made if it is missing.
          keep: how many checkpoints to keep.
          num_bytes: size of one checkpoint.

        Raises:
          CheckpointError: the folder cannot be written to, or its disk is too full.
        """
        quiet()
        check_writable(folder, "folder", "--workdir")
        if problem := lack_of_space(folder, num_bytes):
            raise CheckpointError(
                f"{problem} or choose another folder= (a command: --workdir)"
            )
        self._folder = folder
        self._failed, self._given_up = FailedWrites(folder), False
        self._writing: int | None = None
        self._manager = ocp.CheckpointManager(
            folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=False, cleanup_tmp_directories=True
            ),
            item_handlers={
                STATE: _writer(),
                METADATA: ocp.JsonCheckpointHandler(),
                EXTRA: _writer(),
            },
        )

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints that this process sees, ascending."""
        return sorted(self._manager.all_steps())

    def holds(self, step: int) -> bool:
        """Whether the folder holds a step now, as far as this process sees."""
        return (self._folder / str(step)).is_dir()

    def checkpoints(self) -> list[tuple[int, str]]:
        """(step, name) of the checkpoints that process 0 sees, ascending."""
        steps = allgather_objects("checkpoints", self.steps())[0]
        return [(step, str(step)) for step in steps]

    def save(self, step: int, state: Any, extra: Any, metadata: dict[str, Any]) -> None:
        """Starts writing a checkpoint, unless the folder holds the step already.

        Raises:
          CheckpointError: this write or the one before it failed.
        """
        check_present(self._folder)
        self.wait()
        if step in self._manager.all_steps():
            return
        metadata = {**metadata, _CHECKSUM: json_checksum(metadata)}
        blocks = jax.tree.map(
            lambda _: ocp.SaveArgs(chunk_byte_size=BLOCK_BYTES), state
        )
        arguments = {
            STATE: ocp.args.PyTreeSave(state, save_args=blocks),
            METADATA: ocp.args.JsonSave(metadata),
        }
        if extra is not None:
            arguments[EXTRA] = ocp.args.PyTreeSave(extra)
        self._writing = step
        try:
            self._manager.save(step, args=ocp.args.Composite(**arguments))
        except Exception as error:
            raise self._failure(error) from error

    def wait(self) -> None:
        """Waits until the last checkpoint is complete.

        Raises:
          CheckpointError: the write failed.
        """
        try:
            self._failed.wait(self._manager.wait_until_finished)
        except Exception as error:
            self._given_up = isinstance(error, WriteFailedError)
            raise self._failure(error) from error
        self._writing = None

    def _failure(self, error: Exception) -> MeshparError:
        """The error of the write that failed."""
        complete = [step for step in self.steps() if step != self._writing]
        return failed_write(self._folder, error, complete)

    def metadata(self, name: str) -> dict[str, Any]:
        """The metadata that was saved with a checkpoint.

        Raises:
          OSError, ValueError: it cannot be read, or has changed.
        """
        return _read_metadata(self._folder / name)

    def read(self, name: str, state: Any, extra: Any) -> tuple[Any, Any]:
        """Reads this process's shards, as `read_checkpoint` does."""
        return read_checkpoint(self._folder / name, state, extra)

    def reject(self, name: str, problems: Problems) -> None:
        """Moves a corrupt checkpoint to the folder `corrupt`; deletes nothing.

        Raises:
          CheckpointError: the problem may be transient; nothing has been moved.
        """
        if problems.any(Kind.TRANSIENT):
            raise CheckpointError(
                f"checkpoint {name} in {self._folder} cannot be read now, and was left "
                f"unchanged: {problems}"
            )
        logging.warning(
            "checkpoint %s in %s cannot be read and is set aside; the one before it is "
            "used: %s",
            name,
            self._folder,
            problems,
        )
        if jax.process_index() == 0:
            aside = self._folder.parent / "corrupt"
            aside.mkdir(exist_ok=True)
            number = len(list(aside.glob(f"{name}-*")))
            (self._folder / name).rename(aside / f"{name}-{number}")
        allgather_objects("set aside", name)  # The others reload after the move.
        self._manager.reload()

    def discard_after(self, step: int) -> None:
        """Deletes nothing: later checkpoints have been rejected, thus set aside."""

    def close(self) -> None:
        """Waits as `wait` does, and releases the folder.

        After a failure of another process it leaves both to the end of this one.
        """
        if not self._given_up:
            self.wait()
            self._manager.close()
        self._failed.close()
