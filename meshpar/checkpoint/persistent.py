"""The persistent tier of checkpoints: one folder for all processes, by orbax.

Orbax writes asynchronously and renames a checkpoint into place when it is complete, so
one is complete or invisible. It does not depend on the layout.
"""

import contextlib
import json
import os
import pathlib
import shutil
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from meshpar.checkpoint.checksums import json_checksum
from meshpar.errors import CheckpointError
from meshpar.lowering.replicas import with_replicas
from meshpar.lowering.state import TrainState
from meshpar.multihost.agree import allgather_objects

STATE, METADATA, EXTRA = "state", "metadata", "synchronization"
TENSORS, REPLICAS, _CHECKSUM = "tensors", "replicas", "checksum"


def tensors(state: Any) -> dict[str, list]:
    """{key path: [shape, dtype]} of a state; equal for equal models and optimizers."""
    return {
        jax.tree_util.keystr(keys): [list(leaf.shape), str(leaf.dtype)]
        for keys, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
    }


def difference(ours: dict[str, list], theirs: dict[str, list]) -> str:
    """The first tensor in which two states differ; "" if none does."""
    for path in {**ours, **theirs}:
        here, there = ours.get(path, "nothing"), theirs.get(path, "nothing")
        if here != there:
            return f"{path} is {there} there and {here} here"
    return ""


class Found(NamedTuple):
    """One checkpoint in a folder, read without a device.

    Attributes:
      step: its step.
      path: its folder.
      num_bytes: bytes on disk.
      metadata: what was saved with it; None if it cannot be read.
      problem: why it cannot be used; "" if it is complete.
    """

    step: int
    path: pathlib.Path
    num_bytes: int
    metadata: dict[str, Any] | None
    problem: str


def find_checkpoints(folder: str | os.PathLike) -> list[Found]:
    """The checkpoints in a folder by step, incomplete ones among them.

    Args:
      folder: the folder given to `Checkpoints`.
    """
    found = []
    for path in pathlib.Path(folder).glob("*"):
        number = path.name.partition(".")[0]
        if not number.isdigit() or not path.is_dir():
            continue
        metadata, problem, size = None, "", 0
        for file in path.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # A run is at work there.
                size += file.stat().st_size if file.is_file() else 0
        try:
            metadata = _metadata(path)
        except (OSError, ValueError) as error:
            problem = f"its metadata cannot be read ({type(error).__name__})"
        if "." in path.name:
            problem = "incomplete: it was being written"
        elif not (path / STATE).is_dir():
            problem = "its state is missing"
        found.append(Found(int(number), path, size, metadata, problem))
    return sorted(found)


def reason_not_restorable(
    found: Found, abstract_state: TrainState, num_replicas: int = 1
) -> str:
    """Why a checkpoint cannot be restored to a state; "" if it can.

    Args:
      found: the checkpoint.
      abstract_state: shapes, dtypes and shardings to restore to.
      num_replicas: replicas of that state.
    """
    if found.problem:
        return found.problem
    theirs = found.metadata.get(REPLICAS, 1)
    if theirs != num_replicas:
        state = with_replicas(abstract_state, num_replicas, theirs)
        abstract_state = state
    return difference(tensors(abstract_state), found.metadata[TENSORS])


def _metadata(path: pathlib.Path) -> dict[str, Any]:
    """What was saved beside the state.

    Raises:
      OSError, ValueError: it cannot be read, or has changed since.
    """
    metadata = json.loads((path / METADATA / METADATA).read_text())
    known = metadata.pop(_CHECKSUM, None)  # The first ones had none.
    if known not in (None, json_checksum(metadata)):
        raise ValueError("its metadata has changed since it was written")
    return metadata


def read_checkpoint(path: pathlib.Path, state: Any, extra: Any) -> tuple[Any, Any]:
    """Reads what this process needs of a checkpoint, without the other processes.

    Args:
      path: its folder.
      state: ShapeDtypeStructs with shardings.
      extra: likewise, or None to leave it out.

    Raises:
      Exception: it cannot be read.
    """
    process = jax.process_index()
    # A barrier would wait for a process that failed.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process,
        active_processes={process},
        barrier_sync_key_prefix=f"alone-{process}",
    )
    reader = ocp.Checkpointer(
        ocp.StandardCheckpointHandler(multiprocessing_options=alone),
        multiprocessing_options=alone,
    )

    def item(name: str, abstract: Any) -> Any:
        return reader.restore(path / name, args=ocp.args.StandardRestore(abstract))

    with contextlib.closing(reader):
        return item(STATE, state), None if extra is None else item(EXTRA, extra)


class PersistentTier:
    """The checkpoints in one folder."""

    def __init__(self, folder: pathlib.Path, keep: int):
        """Opens an existing folder.

        Args:
          folder: holds one sub-folder per step.
          keep: how many checkpoints to keep.
        """
        self._folder = folder
        self._manager = ocp.CheckpointManager(
            folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=False, cleanup_tmp_directories=True
            ),
            item_names=(STATE, METADATA, EXTRA),
        )

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, extra: Any, metadata: dict) -> None:
        """Starts writing a checkpoint, unless the step is there already.

        Raises:
          CheckpointError: this write or the one before it failed.
        """
        if step in self._manager.all_steps():
            return
        metadata = {**metadata, _CHECKSUM: json_checksum(metadata)}
        arguments = {
            STATE: ocp.args.StandardSave(state),
            METADATA: ocp.args.JsonSave(metadata),
        }
        if extra is not None:
            arguments[EXTRA] = ocp.args.StandardSave(extra)
        try:
            self._manager.save(step, args=ocp.args.Composite(**arguments))
        except Exception as error:
            raise self._failed_write(error) from error

    def wait(self) -> None:
        """Waits until the last checkpoint is complete.

        Raises:
          CheckpointError: the write failed.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed_write(error) from error

    def _failed_write(self, error: Exception) -> CheckpointError:
        free = shutil.disk_usage(self._folder).free
        return CheckpointError(
            f"writing a checkpoint to {self._folder} failed ({free} bytes free there): "
            f"{error}; make room and run the same command again; complete ones are "
            f"untouched: {self.steps()}"
        )

    def metadata(self, step: int) -> dict[str, Any]:
        """What was saved beside the state.

        Raises:
          OSError, ValueError: it cannot be read.
        """
        return _metadata(self._folder / str(step))

    def read(self, step: int, state: Any, extra: Any) -> tuple[Any, Any]:
        """As the function `read`."""
        return read_checkpoint(self._folder / str(step), state, extra)

    def set_aside(self, step: int) -> None:
        """Moves a checkpoint out of the way; deletes nothing. All processes call it."""
        if jax.process_index() == 0:
            aside = self._folder.parent / "corrupt"
            aside.mkdir(exist_ok=True)
            number = len(list(aside.glob(f"{step}-*")))
            (self._folder / str(step)).rename(aside / f"{step}-{number}")
        allgather_objects("set aside", step)  # The others look again then.
        self._manager.reload()

    def close(self) -> None:
        """As `wait`, and releases the folder."""
        self.wait()
        self._manager.close()
