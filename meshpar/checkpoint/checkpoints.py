"""Checkpoints: training state and data position together, complete or invisible.

Two tiers hold them: the run's own folder (`persistent`), and if wished the disk of each
machine (`local`). A checkpoint does not depend on the layout: it
restores onto any mesh and any number of processes. The newest that all processes can
read is taken; one that is corrupt is named, moved aside, and the one before it is used.
"""

import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from meshpar.checkpoint.boxes import leaves_by_path
from meshpar.checkpoint.checksums import checksums
from meshpar.checkpoint.disk_space import check_writable, lack_of_space
from meshpar.checkpoint.local import LocalTier
from meshpar.checkpoint.persistent import (
    EXTRA,
    REPLICAS,
    TENSORS,
    PersistentTier,
    difference,
    tensors,
)
from meshpar.checkpoint.read_problems import Kind, Problem, Problems
from meshpar.errors import CheckpointError
from meshpar.lowering.replicas import converted, with_replicas
from meshpar.lowering.state import TrainState
from meshpar.multihost.agree import allgather_objects

CHECKSUMS = "checksums"


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
        abstract = jax.tree.leaves((abstract_state, abstract_extra))
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in abstract)
        check_writable(self._folder, "--workdir")
        if problem := lack_of_space(self._folder, size):
            raise CheckpointError(f"{problem} or choose another --workdir")
        self._persistent = PersistentTier(self._folder, keep)
        self._local: LocalTier | None = None
        if local_folder:
            self._local = LocalTier.open(local_folder, self._folder, abstract)

    def save(
        self,
        step: int,
        state: TrainState,
        metadata: dict[str, Any],
        extra: Any = None,
        *,
        persistent: bool = True,
    ) -> None:
        """Starts writing a checkpoint, to the local disks first.

        Args:
          step: its number.
          state: the training state.
          metadata: JSON (data position, config).
          extra: what belongs to `abstract_extra`.
          persistent: whether the run's folder gets it, too.

        Raises:
          CheckpointError: this write or the one before it failed.
        """
        metadata = {
            **metadata,
            TENSORS: tensors(state),
            EXTRA: tensors(extra) | self._extra_identity,
            REPLICAS: self._replicas,
            CHECKSUMS: [checksums(state), checksums(extra)],
        }
        if self._local is not None:
            self._local.save(step, state, extra, metadata)
        if persistent:
            self._persistent.save(step, state, extra, metadata)

    def wait(self) -> None:
        """Waits until the last checkpoint is complete.

        Raises:
          CheckpointError: the write failed.
        """
        if self._local is not None:
            self._local.wait()
        self._persistent.wait()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints in the run's folder, ascending."""
        return self._persistent.steps()

    def restore(self) -> Restored | None:
        """Restores the newest intact checkpoint onto the current layout.

        All processes call it, and all take the same one.

        Returns:
          State, metadata and extra, or None if there is no checkpoint.

        Raises:
          CheckpointError: the folder belongs to another model or optimizer, or no
            checkpoint in it can be read.
          MissingError: processes that did not come along.
        """
        broken = []
        for step, tier, name in self._newest_first():
            found, problems = self._attempt(tier, name)
            if problems and not problems.any(Kind.OTHER):
                found, problems = self._attempt(tier, name)  # Perhaps a hiccup.
            if not problems:
                if self._local is not None:
                    self._local.forget_after(step)
                return self._finished(step, *found)
            if problems.any(Kind.OTHER):
                raise CheckpointError(
                    f"checkpoint {step} in {self._folder} is of another model or "
                    f"optimizer: {problems}; use another --workdir, or the flags of "
                    "that run"
                )
            if tier is self._local:
                logging.warning("local checkpoint %d: %s", step, problems)
                continue
            if problems.any(Kind.PASSING):
                raise CheckpointError(
                    f"checkpoint {step} in {self._folder} cannot be read now, and lies "
                    f"untouched: {problems}"
                )
            logging.warning(
                "checkpoint %d in %s cannot be read and is set aside, the one before "
                "it is used: %s",
                step,
                self._folder,
                problems,
            )
            self._persistent.set_aside(step)
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

    def _newest_first(self) -> list[tuple[int, PersistentTier | LocalTier, int | str]]:
        """(step, tier, its name there), the same on all processes; local ones first."""
        steps = allgather_objects("checkpoints", self.steps())[0]
        found = [(step, self._persistent, step) for step in steps]
        if self._local is not None:
            here = self._local.checkpoints()
            found += [(step, self._local, name) for step, name in here]
        found.sort(key=lambda one: (one[0], one[1] is self._local))
        return found[::-1]  # Of one step the latest start, as names are in order.

    def _attempt(
        self, tier: PersistentTier | LocalTier, name: int | str
    ) -> tuple[Any, Problems]:
        """(state, extra, metadata) as they were saved, or why not."""
        found, problem = self._read(tier, name)
        problems = Problems.told(problem)
        if not problems and (why := changed_tensor(*found)):
            problems = Problems.everywhere(Problem(Kind.CORRUPT, why))
        return found, problems

    def _read(
        self, tier: PersistentTier | LocalTier, name: int | str
    ) -> tuple[tuple[Any, Any, dict[str, Any]] | None, Problem | None]:
        """The same of this process alone."""
        try:
            metadata = dict(tier.metadata(name))
            theirs = metadata.get(REPLICAS, 1)
            abstract = self._abstract_state
            if theirs != self._replicas:
                abstract = with_replicas(abstract, self._replicas, theirs)
            if differs := difference(tensors(abstract), metadata[TENSORS]):
                return None, Problem(Kind.OTHER, differs)
            wanted = self._abstract_extra if self._fits(metadata) else None
            state, extra = tier.read(name, abstract, wanted)
        except Exception as error:
            return None, Problem.of(error)
        return (state, extra, metadata), None

    def _fits(self, metadata: Mapping[str, Any]) -> bool:
        """Whether what is saved for the same layout and mode alone can be used."""
        expected = tensors(self._abstract_extra) | self._extra_identity
        same = metadata.get(REPLICAS, 1) == self._replicas
        return same and metadata.get(EXTRA, {"mode": ""}) == expected

    def _finished(
        self, step: int, state: TrainState, extra: Any, metadata: dict[str, Any]
    ) -> Restored:
        """A checkpoint as this layout needs it."""
        fits, note = self._fits(metadata), ""
        theirs, ours = metadata.pop(REPLICAS, 1), self._replicas
        for name in (TENSORS, EXTRA, CHECKSUMS):
            metadata.pop(name, None)
        if theirs != ours:
            state = converted(state, theirs, self._abstract_state, ours)
        if theirs > 1 and not fits:
            kept = "kept apart" if theirs == ours else "replaced by their average"
            note = (
                f"restored step {step} of {theirs} replicas, {kept}; global weights"
                " and outer momentum start anew from the average"
            )
        return Restored(state, metadata, extra, note)

    def close(self) -> None:
        """Waits for the last write and releases the folders.

        Raises:
          CheckpointError: the write failed.
        """
        if self._local is not None:
            self._local.close()
        self._persistent.close()


def changed_tensor(state: Any, extra: Any, metadata: Mapping[str, Any]) -> str:
    """The first tensor that is not what was saved; "" if none is. All call it.

    Args:
      state: as saved.
      extra: likewise, or None to leave it out.
      metadata: what was saved with them; the first ones had no checksums.
    """
    known = metadata.get(CHECKSUMS, ([], []))
    for tree, numbers in zip((state, extra), known, strict=True):
        if not numbers or tree is None:
            continue
        for path, now, then in zip(
            leaves_by_path(tree), checksums(tree), numbers, strict=True
        ):
            if now != then:
                return f"{path} has changed since it was written"
    return ""
