"""Checkpoints: training state and data position together, complete or invisible.

Orbax writes them asynchronously and renames them into place when they are complete. A
checkpoint does not depend on the layout: it restores onto any mesh and any number of
processes. A corrupt one is named, moved aside and the one before it is used.
"""

import logging
import os
import pathlib
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp

from meshpar.errors import MeshparError
from meshpar.lowering import TrainState

_STATE, _METADATA, _TENSORS = "state", "metadata", "tensors"


class CheckpointError(MeshparError):
    """A checkpoint folder that cannot be used, with the reason and the remedy."""


def _tensors(state: TrainState) -> dict[str, list]:
    """{key path: [shape, dtype]} of a state; equal for equal models and optimizers."""
    return {
        jax.tree_util.keystr(keys): [list(leaf.shape), str(leaf.dtype)]
        for keys, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
    }


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
        self, folder: str | os.PathLike, abstract_state: TrainState, keep: int = 2
    ):
        """Opens or makes the folder.

        Args:
          folder: holds one sub-folder per step.
          abstract_state: shapes, dtypes and shardings to restore to.
          keep: how many checkpoints to keep, at least 1.

        Raises:
          CheckpointError: the folder cannot be written to, or the disk is too full.
        """
        if keep < 1:
            raise CheckpointError(f"keep={keep}: keep at least 1 checkpoint")
        self._folder = pathlib.Path(folder).absolute()
        self._abstract_state = abstract_state
        _check_writable(self._folder, abstract_state)
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=False, cleanup_tmp_directories=True
            ),
            item_names=(_STATE, _METADATA),
        )

    def save(self, step: int, state: TrainState, metadata: dict[str, Any]) -> None:
        """Starts writing a checkpoint; `metadata` is JSON (data position, config).

        Raises:
          CheckpointError: this write or the one before it failed.
        """
        if step in self._manager.all_steps():
            return
        metadata = {**metadata, _TENSORS: _tensors(state)}
        arguments = {
            _STATE: ocp.args.StandardSave(state),
            _METADATA: ocp.args.JsonSave(metadata),
        }
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

    def restore(self) -> tuple[TrainState, dict[str, Any]] | None:
        """Restores the newest intact checkpoint onto the current layout.

        Returns:
          State and metadata, or None if there is no checkpoint.

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
            except Exception as error:
                self._set_aside(step, error)
                broken.append(step)
                continue
            self._check_same_model(step, tensors)
            try:
                arguments = {_STATE: ocp.args.StandardRestore(self._abstract_state)}
                restored = self._manager.restore(
                    step, args=ocp.args.Composite(**arguments)
                )
                return restored[_STATE], metadata
            except Exception as error:
                self._set_aside(step, error)
                broken.append(step)
        if broken:
            raise CheckpointError(
                f"none of the checkpoints {broken} in {self._folder} can be read; they "
                f"lie in {self._folder.parent / 'corrupt'}; start anew in another "
                "--workdir, or run again to start anew here"
            )
        return None

    def _check_same_model(self, step: int, tensors: dict[str, list]) -> None:
        ours = _tensors(self._abstract_state)
        for path in {**ours, **tensors}:
            here, there = ours.get(path, "nothing"), tensors.get(path, "nothing")
            if here != there:
                raise CheckpointError(
                    f"checkpoint {step} in {self._folder} is of another model or "
                    f"optimizer: {path} is {there} there and {here} here; use another "
                    "--workdir, or the flags of that run"
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
