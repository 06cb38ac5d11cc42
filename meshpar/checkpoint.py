"""Checkpoints: training state and data position together, complete or invisible.

Orbax writes them asynchronously and renames them into place when they are complete. A
checkpoint does not depend on the layout: it restores onto any mesh and any number of
processes. A corrupt one is named, moved aside and the one before it is used.
"""

import json
import logging
import os
import pathlib
import shutil
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from meshpar import replicas
from meshpar.errors import MeshparError
from meshpar.lowering import TrainState

_STATE, _METADATA, _EXTRA = "state", "metadata", "synchronization"
_TENSORS, _REPLICAS = "tensors", "replicas"


class Restored(NamedTuple):
    """What a checkpoint gives back.

    Attributes:
      state: the training state.
      metadata: what was saved with it.
      extra: what only the same layout and mode can use; None if it does not fit.
      note: what was changed on the way, for people; "" if nothing.
    """

    state: TrainState
    metadata: dict[str, Any]
    extra: Any
    note: str


class CheckpointError(MeshparError):
    """A checkpoint folder that cannot be used, with the reason and the remedy."""


def _tensors(state: Any) -> dict[str, list]:
    """{key path: [shape, dtype]} of a state; equal for equal models and optimizers."""
    return {
        jax.tree_util.keystr(keys): [list(leaf.shape), str(leaf.dtype)]
        for keys, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
    }


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


def find(folder: str | os.PathLike) -> list[Found]:
    """The checkpoints in a folder by step, incomplete ones among them.

    Args:
      folder: the folder given to `Checkpoints`.
    """
    found = []
    for path in pathlib.Path(folder).glob("*"):
        number = path.name.partition(".")[0]
        if not number.isdigit() or not path.is_dir():
            continue
        files = [file for file in path.rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        metadata, problem = None, ""
        try:
            text = (path / _METADATA / _METADATA).read_text()
            metadata = json.loads(text)
        except (OSError, json.JSONDecodeError) as error:
            problem = f"its metadata cannot be read ({type(error).__name__})"
        if "." in path.name:
            problem = "incomplete: it was being written"
        elif not (path / _STATE).is_dir():
            problem = "its state is missing"
        found.append(Found(int(number), path, size, metadata, problem))
    return sorted(found)


def why_not(found: Found, abstract_state: TrainState, num_replicas: int = 1) -> str:
    """Why a checkpoint cannot be restored to a state; "" if it can.

    Args:
      found: the checkpoint.
      abstract_state: shapes, dtypes and shardings to restore to.
      num_replicas: replicas of that state.
    """
    if found.problem:
        return found.problem
    theirs = found.metadata.get(_REPLICAS, 1)
    if theirs != num_replicas:
        state = replicas.with_replicas(abstract_state, num_replicas, theirs)
        abstract_state = state
    return _difference(_tensors(abstract_state), found.metadata[_TENSORS])


def _difference(ours: dict[str, list], theirs: dict[str, list]) -> str:
    """The first tensor in which two states differ; "" if none does."""
    for path in {**ours, **theirs}:
        here, there = ours.get(path, "nothing"), theirs.get(path, "nothing")
        if here != there:
            return f"{path} is {there} there and {here} here"
    return ""


def _check_writable(folder: pathlib.Path, state: TrainState) -> None:
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{jax.process_index()}"
        probe.write_bytes(b"meshpar")
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"cannot write to {folder}: {error.strerror}; choose another --workdir"
        ) from error
    free = shutil.disk_usage(folder).free
    if free < size:
        raise CheckpointError(
            f"{folder} has {free} bytes free, and one checkpoint takes about {size}; "
            "free some space or choose another --workdir"
        )


class Checkpoints:
    """The checkpoints of one run, in one folder."""

    def __init__(
        self,
        folder: str | os.PathLike,
        abstract_state: TrainState,
        keep: int = 2,
        *,
        num_replicas: int = 1,
        abstract_extra: Any = None,
        extra_identity: str = "",
    ):
        """Opens or makes the folder.

        Args:
          folder: holds one sub-folder per step.
          abstract_state: shapes, dtypes and shardings to restore to.
          keep: how many checkpoints to keep, at least 1.
          num_replicas: replicas that train apart, in front of weights and optimizer
            state; one of another number is restored through their average.
          abstract_extra: what is saved for the same layout and mode alone, likewise.
          extra_identity: says which mode that is.

        Raises:
          CheckpointError: the folder cannot be written to, or the disk is too full.
        """
        if keep < 1:
            raise CheckpointError(f"keep={keep}: keep at least 1 checkpoint")
        self._folder = pathlib.Path(folder).absolute()
        self._abstract_state = abstract_state
        self._replicas, self._abstract_extra = num_replicas, abstract_extra
        self._extra_identity = {"mode": extra_identity}
        _check_writable(self._folder, abstract_state)
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=False, cleanup_tmp_directories=True
            ),
            item_names=(_STATE, _METADATA, _EXTRA),
        )

    def save(
        self, step: int, state: TrainState, metadata: dict[str, Any], extra: Any = None
    ) -> None:
        """Starts writing a checkpoint.

        Args:
          step: its number.
          state: the training state.
          metadata: JSON (data position, config).
          extra: what belongs to `abstract_extra`.

        Raises:
          CheckpointError: this write or the one before it failed.
        """
        if step in self._manager.all_steps():
            return
        metadata = {
            **metadata,
            _TENSORS: _tensors(state),
            _EXTRA: _tensors(extra) | self._extra_identity,
            _REPLICAS: self._replicas,
        }
        arguments = {
            _STATE: ocp.args.StandardSave(state),
            _METADATA: ocp.args.JsonSave(metadata),
        }
        if extra is not None:
            arguments[_EXTRA] = ocp.args.StandardSave(extra)
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

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def restore(self) -> Restored | None:
        """Restores the newest intact checkpoint onto the current layout.

        Returns:
          State, metadata and extra, or None if there is no checkpoint.

        Raises:
          CheckpointError: the folder belongs to another model or optimizer, or no
            checkpoint in it can be read.
        """
        broken = []
        for step in reversed(self.steps()):
            try:
                metadata = self._manager.restore(
                    step,
                    args=ocp.args.Composite(**{_METADATA: ocp.args.JsonRestore()}),
                )[_METADATA]
                tensors = metadata.pop(_TENSORS)
                # Runs of a single replica did not say so at first.
                extra = metadata.pop(_EXTRA, {"mode": ""})
                theirs = metadata.pop(_REPLICAS, 1)
            except Exception as error:
                self._set_aside(step, error)
                broken.append(step)
                continue
            ours, abstract = self._replicas, self._abstract_state
            if theirs != ours:
                abstract = replicas.with_replicas(abstract, ours, theirs)
            self._check_same_model(step, tensors, abstract)
            expected = _tensors(self._abstract_extra) | self._extra_identity
            fits = theirs == ours and extra == expected
            arguments = {_STATE: ocp.args.StandardRestore(abstract)}
            if fits and self._abstract_extra is not None:
                arguments[_EXTRA] = ocp.args.StandardRestore(self._abstract_extra)
            try:
                restored = self._manager.restore(
                    step, args=ocp.args.Composite(**arguments)
                )
            except Exception as error:
                self._set_aside(step, error)
                broken.append(step)
                continue
            state, note = restored[_STATE], ""
            if theirs != ours:
                state = replicas.converted(state, theirs, self._abstract_state, ours)
            if theirs > 1 and not fits:
                kept = "kept apart" if theirs == ours else "replaced by their average"
                note = (
                    f"restored step {step} of {theirs} replicas, {kept}; global weights"
                    " and outer momentum start anew from the average"
                )
            return Restored(state, metadata, restored.get(_EXTRA), note)
        if broken:
            raise CheckpointError(
                f"none of the checkpoints {broken} in {self._folder} can be read; they "
                f"lie in {self._folder.parent / 'corrupt'}; start anew in another "
                "--workdir, or run again to start anew here"
            )
        return None

    def _check_same_model(
        self, step: int, tensors: dict[str, list], abstract: TrainState
    ) -> None:
        if difference := _difference(_tensors(abstract), tensors):
            raise CheckpointError(
                f"checkpoint {step} in {self._folder} is of another model or "
                f"optimizer: {difference}; use another --workdir, or the flags of that "
                "run"
            )

    def _set_aside(self, step: int, error: Exception) -> None:
        """Moves a checkpoint that cannot be read out of the way; deletes nothing."""
        logging.warning(
            "checkpoint %d in %s cannot be read and is set aside, the one before it "
            "is used: %s",
            step,
            self._folder,
            str(error).split("\n")[0][:300],
        )
        if jax.process_index() == 0:
            aside = self._folder.parent / "corrupt"
            aside.mkdir(exist_ok=True)
            number = len(list(aside.glob(f"{step}*")))
            (self._folder / str(step)).rename(aside / f"{step}-{number}")
        self._manager.reload()

    def close(self) -> None:
        """Waits for the last write and releases the folder."""
        self.wait()
        self._manager.close()
