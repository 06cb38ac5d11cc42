"""Checkpoints of a run: training state and data position, complete or invisible.

Checkpoints are held by tiers: optionally the disk of each machine (`local`), and always
the run's own folder (`persistent`). A checkpoint does not depend on the layout: it
restores onto any mesh and any number of processes. The newest checkpoint that all
processes can read is restored; a corrupt one is logged and set aside, and the one
before it is used.
"""

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from meshpar.arrays import num_bytes
from meshpar.checkpoint.checksums import CHECKSUMS, changed_tensor, checksums
from meshpar.checkpoint.local import LocalTier
from meshpar.checkpoint.mode_identity import EXTRA, MODE, unsaid_settings
from meshpar.checkpoint.persistent import (
    REPLICAS,
    TENSORS,
    PersistentTier,
    first_difference,
    shapes_and_dtypes,
)
from meshpar.checkpoint.random_keys import with_keys, without_keys
from meshpar.checkpoint.read_problems import Kind, Problem, Problems
from meshpar.checkpoint.tier import Tier
from meshpar.errors import CheckpointError
from meshpar.lowering.replicas import converted, with_replicas
from meshpar.lowering.state import TrainState
from meshpar.multihost.agree import allgather_objects


class Restored(NamedTuple):
    """A restored checkpoint.

    Attributes:
      state: the training state.
      metadata: the metadata saved with it.
      extra: state of the same layout and mode alone; None if it does not fit.
      note: for people: how the state differs from the saved one; "" if it does not.
      persistent: whether the run's own folder holds the step; a step that only local
        disks hold can still be lost.
    """

    state: TrainState
    metadata: dict[str, Any]
    extra: Any
    note: str
    persistent: bool = True


class _Content(NamedTuple):
    """A checkpoint as it was saved."""

    state: TrainState
    extra: Any
    metadata: dict[str, Any]


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
        """Opens the folders, and makes those that are missing.

        Args:
          folder: holds one sub-folder per step; seen by all processes.
          abstract_state: shapes, dtypes and shardings to restore to.
          keep: how many checkpoints to keep in `folder`, at least 1.
          local_folder: on a disk of each machine; runs may share it; "" for none.
          num_replicas: size of the leading replica dim of weights and optimizer state,
            1 for no such dim; a checkpoint of another number of replicas is restored
            through their average.
          abstract_extra: shapes, dtypes and shardings of the state that only the same
            layout and mode can restore; None for none.
          extra_identity: text that is equal for equal modes.

        Raises:
          CheckpointError: a folder cannot be written to, or its disk is too full.
        """
        if keep < 1:
            raise CheckpointError(f"keep={keep}: keep at least 1 checkpoint")
        self._folder = pathlib.Path(folder).absolute()
        self._like = abstract_state, abstract_extra
        self._abstract_state, self._abstract_extra = without_keys(self._like)
        self._num_replicas = num_replicas
        self._extra_identity = extra_identity
        abstract = jax.tree.leaves((self._abstract_state, self._abstract_extra))
        size = sum(map(num_bytes, abstract))
        self._persistent = PersistentTier(self._folder, keep, size)
        self._tiers: list[Tier] = [self._persistent]  # In order of preference.
        if local_folder:
            local = LocalTier.open(local_folder, self._folder, abstract)
            self._tiers.insert(0, local)

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
          step: number of training steps done.
          state: the training state.
          metadata: anything that JSON can hold (data position, config).
          extra: arrays for `abstract_extra`.
          persistent: whether to save to the run's folder as well as to local disks.

        Raises:
          CheckpointError: this write or the one before it failed.
        """
        state, extra = without_keys((state, extra))
        metadata = {
            **metadata,
            TENSORS: shapes_and_dtypes(state),
            EXTRA: shapes_and_dtypes(extra) | {MODE: self._extra_identity},
            REPLICAS: self._num_replicas,
            CHECKSUMS: [checksums(state), checksums(extra)],
        }
        for tier in self._tiers:
            if persistent or not tier.persistent:
                tier.save(step, state, extra, metadata)

    def wait(self) -> None:
        """Waits until the last checkpoint is complete.

        Raises:
          CheckpointError: the write failed.
        """
        for tier in self._tiers:
            tier.wait()

    def check_saved(self, step: int) -> None:
        """Looks for a step in the run's own folder; all processes call it after `wait`.

        Raises:
          CheckpointError: the folder does not hold the step.
        """
        if not allgather_objects("saved", self._persistent.holds(step))[0]:
            raise CheckpointError(
                f"{self._folder} does not hold the checkpoint of step {step}, which "
                "has been written; mount the disk or restore the folder, and run the "
                "same command again"
            )

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints in the run's folder, ascending."""
        return self._persistent.steps()

    def restore(
        self,
        last_step: int | None = None,
        not_finite: Callable[[TrainState, Any], str] = lambda state, extra: "",
        *,
        last_good: bool = False,
    ) -> Restored | None:
        """Restores the newest intact checkpoint onto the current layout.

        All processes call it and restore the same checkpoint.

        Args:
          last_step: of the run; it is read from the run's folder first, as no later
            one would replace a damaged copy there.
          not_finite: (state, extra state or None) -> the first tensor with a number
            that is none, "" if there is none; the same on all processes.
          last_good: whether such a checkpoint is set aside as a corrupt one is; by
            default it is an error.

        Returns:
          The checkpoint, or None if there is none.

        Raises:
          CheckpointError: the folder belongs to another model or optimizer, no
            checkpoint in it can be read, or the newest is not finite.
          MissingError: some processes did not take part in time.
        """
        rejected, found = [], self._newest_first(last_step)
        persistent_steps = {step for step, tier, _ in found if tier.persistent}
        for step, tier, name in found:
            content, problems = self._read(tier, name)
            if problems and not problems.any(Kind.OTHER):
                content, problems = self._read(tier, name)  # It may be transient.
            if not problems and (tensor := not_finite(content.state, content.extra)):
                if not last_good:
                    raise self._not_finite(step, tensor)
                problem = Problem(Kind.NOT_FINITE, f"{tensor} is not finite")
                problems = Problems.everywhere(problem)
            if not problems:
                self._discard_after(step)
                restored = self._converted(step, content)
                persistent_steps.difference_update(rejected)
                return restored._replace(persistent=step in persistent_steps)
            if problems.any(Kind.OTHER):
                raise CheckpointError(
                    f"checkpoint {step} in {self._folder} is of another model or "
                    f"optimizer: {problems}; use another folder= (a command: another "
                    "--workdir, or the flags of that run)"
                )
            tier.reject(name, problems)
            if tier.persistent:
                rejected.append(step)
        if rejected:
            raise CheckpointError(
                f"none of the checkpoints {rejected} in {self._folder} can be read; "
                f"they have been moved to {self._folder.parent / 'corrupt'}; start "
                "anew in another folder= (a command: in another --workdir, or in this "
                "one with --start_anew)"
            )
        self._discard_after(-1)
        return None

    def _not_finite(self, step: int, tensor: str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {step} in {self._folder}: {tensor} holds NaN or infinite "
            "numbers; add --resume=last_good (a call: resume='last_good') to set it "
            "aside and go back to the last good one"
        )

    def _newest_first(self, last_step: int | None) -> list[tuple[int, Tier, str]]:
        """(step, tier, name), the same on all processes; of equal ones local first."""
        checkpoints = [
            (step, tier, name)
            for tier in reversed(self._tiers)
            for step, name in tier.checkpoints()
        ]
        # Reversing a stable sort puts the first tier, and in it the last name, first.
        return sorted(
            checkpoints, key=lambda c: (c[0], c[0] == last_step and c[1].persistent)
        )[::-1]

    def _discard_after(self, step: int) -> None:
        for tier in self._tiers:
            tier.discard_after(step)

    def _read(self, tier: Tier, name: str) -> tuple[_Content | None, Problems]:
        """Reads a checkpoint, and gathers why processes could not."""
        content, problem = self._read_own_shards(tier, name)
        problems = Problems.gather(problem)
        if not problems and (reason := changed_tensor(*content)):
            problems = Problems.everywhere(Problem(Kind.CORRUPT, reason))
        return content, problems

    def _read_own_shards(
        self, tier: Tier, name: str
    ) -> tuple[_Content | None, Problem | None]:
        try:
            metadata = dict(tier.metadata(name))
            saved_replicas = metadata.get(REPLICAS, 1)
            abstract = self._abstract_state
            if saved_replicas != self._num_replicas:
                abstract = with_replicas(abstract, self._num_replicas, saved_replicas)
            own = shapes_and_dtypes(abstract)
            if difference := first_difference(own, metadata[TENSORS]):
                return None, Problem(Kind.OTHER, difference)
            abstract_extra = self._abstract_extra if self._fits(metadata) else None
            state, extra = tier.read(name, abstract, abstract_extra)
        except Exception as error:
            return None, Problem.of(error)
        return _Content(state, extra, metadata), None

    def _fits(self, metadata: Mapping[str, Any]) -> bool:
        """Whether the saved extra state is of this layout and mode."""
        if unsaid_settings(metadata, self._extra_identity) is None:
            return False
        saved = {k: x for k, x in metadata.get(EXTRA, {}).items() if k != MODE}
        same = metadata.get(REPLICAS, 1) == self._num_replicas
        return same and saved == shapes_and_dtypes(self._abstract_extra)

    def _converted(self, step: int, content: _Content) -> Restored:
        """Converts a checkpoint to this run's number of replicas."""
        state, extra, metadata = content
        fits, note = self._fits(metadata), ""
        saved_replicas = metadata.get(REPLICAS, 1)
        internal = (REPLICAS, TENSORS, EXTRA, CHECKSUMS)
        metadata = {key: x for key, x in metadata.items() if key not in internal}
        same = saved_replicas == self._num_replicas
        if not same:
            state = converted(
                state, saved_replicas, self._abstract_state, self._num_replicas
            )
        if saved_replicas > 1 and not fits:
            replicas = "kept apart" if same else "replaced by their average"
            note = (
                f"restored step {step} of {saved_replicas} replicas, {replicas}; "
                "global weights and outer momentum start anew from the average"
            )
        elif unsaid := unsaid_settings(content.metadata, self._extra_identity):
            note = (
                f"step {step} does not say its {unsaid}, as an earlier version saved "
                "it; it resumes with that of this run"
            )
        if extra is not None:
            extra = with_keys(extra, self._like[1])
        return Restored(with_keys(state, self._like[0]), metadata, extra, note)

    def close(self) -> None:
        """Waits for the last write and releases the folders.

        Raises:
          CheckpointError: the write failed.
        """
        for tier in self._tiers:
            tier.close()
