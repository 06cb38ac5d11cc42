"""Checkpoints: training state and data position together, complete or invisible.

Two tiers hold them: the run's own folder (`meshpar.durable`), and if wished the disk of
each machine (`meshpar.local_disk`). A checkpoint does not depend on the layout: it
restores onto any mesh and any number of processes. The newest that all processes can
read is taken; one that is corrupt is named, moved aside, and the one before it is used.
"""

import logging
import os
import pathlib
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from meshpar import multihost, replicas
from meshpar.durable import (
    EXTRA,
    REPLICAS,
    TENSORS,
    Durable,
    check_writable,
    difference,
    tensors,
)
from meshpar.errors import CheckpointError
from meshpar.local_disk import LocalDisk
from meshpar.lowering import TrainState


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


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        folder: str | os.PathLike,
        abstract_state: TrainState,
        keep: int = 2,
        *,
        local_folder: str | os.PathLike = "",
        num_replicas: int = 1,
        abstract_extra: Any = None,
        extra_identity: str = "",
    ):
        """Opens or makes the folders.

        Args:
          folder: holds one sub-folder per step; seen by all processes.
          abstract_state: shapes, dtypes and shardings to restore to.
          keep: how many checkpoints to keep there, at least 1.
          local_folder: on a disk of each machine, for runs to share; "" for none.
          num_replicas: replicas that train apart, in front of weights and optimizer
            state; one of another number is restored through their average.
          abstract_extra: what is saved for the same layout and mode alone, likewise.
          extra_identity: says which mode that is.

        Raises:
          CheckpointError: a folder cannot be written to, or its disk is too full.
        """
        if keep < 1:
            raise CheckpointError(f"keep={keep}: keep at least 1 checkpoint")
        self._folder = pathlib.Path(folder).absolute()
        self._abstract_state = abstract_state
        self._replicas, self._abstract_extra = num_replicas, abstract_extra
        self._extra_identity = {"mode": extra_identity}
        leaves = jax.tree.leaves((abstract_state, abstract_extra))
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        check_writable(self._folder, size, "--workdir")
        self._durable = Durable(self._folder, keep)
        self._local: LocalDisk | None = None
        if local_folder:
            where = pathlib.Path(local_folder).absolute()
            part = size * len(jax.local_devices()) // len(jax.devices())
            check_writable(where, part, "--checkpoint_local_dir")
            self._local = LocalDisk(where / self._run_id())

    def _run_id(self) -> str:
        """Ties files on local disks to this folder: a new run does not find them."""
        file = self._folder / "run_id"
        if jax.process_index() == 0 and not file.exists():
            partial = file.with_suffix(".partial")
            partial.write_text(uuid.uuid4().hex)
            os.replace(partial, file)
        mine = file.read_text() if jax.process_index() == 0 else ""
        return multihost.exchange(mine)[0]

    def save(
        self,
        step: int,
        state: TrainState,
        metadata: dict[str, Any],
        extra: Any = None,
        *,
        durable: bool = True,
    ) -> None:
        """Starts writing a checkpoint, to the local disks first.

        Args:
          step: its number.
          state: the training state.
          metadata: JSON (data position, config).
          extra: what belongs to `abstract_extra`.
          durable: whether the run's folder gets it, too.

        Raises:
          CheckpointError: this write or the one before it failed.
        """
        metadata = {
            **metadata,
            TENSORS: tensors(state),
            EXTRA: tensors(extra) | self._extra_identity,
            REPLICAS: self._replicas,
        }
        if self._local is not None:
            self._local.save(step, state, extra, metadata)
        if durable:
            self._durable.save(step, state, extra, metadata)

    def wait(self) -> None:
        """Waits until the last checkpoint is complete.

        Raises:
          CheckpointError: the write failed.
        """
        if self._local is not None:
            self._local.wait()
        self._durable.wait()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints in the run's folder, ascending."""
        return self._durable.steps()

    def restore(self) -> Restored | None:
        """Restores the newest intact checkpoint onto the current layout.

        All processes call it, and all take the same one.

        Returns:
          State, metadata and extra, or None if there is no checkpoint.

        Raises:
          CheckpointError: the folder belongs to another model or optimizer, or no
            checkpoint in it can be read.
        """
        broken, tiers = [], [(step, self._durable) for step in self.steps()]
        if self._local is not None:
            tiers += [(step, self._local) for step in self._local.steps()]
        tiers.sort(key=lambda one: (one[0], one[1] is self._local))
        for step, tier in reversed(tiers):
            restored, problem = self._read(step, tier)
            everyone = multihost.exchange(problem)
            problems = {process: text for process, text in everyone.items() if text}
            if not problems:
                if self._local is not None:
                    self._local.forget_after(step)
                return restored
            if tier is self._local:
                logging.warning("local checkpoint %d: %s", step, _said(problems))
                continue
            logging.warning(
                "checkpoint %d in %s cannot be read and is set aside, the one before "
                "it is used: %s",
                step,
                self._folder,
                _said(problems),
            )
            self._durable.set_aside(step)
            broken.append(step)
        if broken:
            raise CheckpointError(
                f"none of the checkpoints {broken} in {self._folder} can be read; they "
                f"lie in {self._folder.parent / 'corrupt'}; start anew in another "
                "--workdir, or run again to start anew here"
            )
        if self._local is not None:
            self._local.forget_after(-1)
        return None

    def _read(
        self, step: int, tier: Durable | LocalDisk
    ) -> tuple[Restored | None, str]:
        """A checkpoint as this layout needs it, or why it cannot be read."""
        try:
            metadata = dict(tier.metadata(step))
            theirs_tensors = metadata.pop(TENSORS)
            # Runs of a single replica did not say so at first.
            extra = metadata.pop(EXTRA, {"mode": ""})
            theirs = metadata.pop(REPLICAS, 1)
        except Exception as error:
            return None, _first_line(error)
        ours, abstract = self._replicas, self._abstract_state
        if theirs != ours:
            abstract = replicas.with_replicas(abstract, ours, theirs)
        if differs := difference(tensors(abstract), theirs_tensors):
            raise CheckpointError(
                f"checkpoint {step} in {self._folder} is of another model or "
                f"optimizer: {differs}; use another --workdir, or the flags of that run"
            )
        expected = tensors(self._abstract_extra) | self._extra_identity
        fits = theirs == ours and extra == expected
        wanted = self._abstract_extra if fits else None
        try:
            state, extra = tier.read(step, abstract, wanted)
        except Exception as error:
            return None, _first_line(error)
        note = ""
        if theirs != ours:
            state = replicas.converted(state, theirs, self._abstract_state, ours)
        if theirs > 1 and not fits:
            kept = "kept apart" if theirs == ours else "replaced by their average"
            note = (
                f"restored step {step} of {theirs} replicas, {kept}; global weights"
                " and outer momentum start anew from the average"
            )
        return Restored(state, metadata, extra, note), ""

    def close(self) -> None:
        """Waits for the last write and releases the folders."""
        if self._local is not None:
            self._local.close()
        self._durable.close()


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}".split("\n")[0][:300]


def _said(problems: Mapping[int, str]) -> str:
    """What went wrong, and in which processes if there are several."""
    if list(problems) == [0] and jax.process_count() == 1:
        return problems[0]
    who: dict[str, list[int]] = {}
    for process, text in problems.items():
        who.setdefault(text, []).append(process)
    return "; ".join(f"process(es) {which}: {text}" for text, which in who.items())
