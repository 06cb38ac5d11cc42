"""The interface of checkpoint tiers: one kind of storage each, such as local disks."""

from typing import Any, ClassVar, Protocol

from meshpar.checkpoint.read_problems import Problems


class Tier(Protocol):
    """Stores the checkpoints of one run; all processes call every method.

    Attributes:
      persistent: whether checkpoints outlive the machines; those of other tiers are
        copies, which may be lost or rejected without an error.
    """

    persistent: ClassVar[bool]

    def checkpoints(self) -> list[tuple[int, str]]:
        """(step, name) of every checkpoint, ascending; the same on all processes."""

    def save(self, step: int, state: Any, extra: Any, metadata: dict[str, Any]) -> None:
        """Starts writing a checkpoint; the arrays may be donated after the call.

        Args:
          step: number of training steps done.
          state: the training state.
          extra: state of the same layout and mode alone, or None.
          metadata: anything that JSON can hold.

        Raises:
          CheckpointError: a persistent tier failed in this write or the one before it.
        """

    def wait(self) -> None:
        """Waits until the last checkpoint is complete.

        Raises:
          CheckpointError: a persistent tier failed to write it.
        """

    def metadata(self, name: str) -> dict[str, Any]:
        """The metadata that was saved with a checkpoint.

        Raises:
          Exception: it cannot be read.
        """

    def read(self, name: str, state: Any, extra: Any) -> tuple[Any, Any]:
        """Reads this process's shards of (state, extra).

        Args:
          name: the checkpoint's, from `checkpoints`.
          state: ShapeDtypeStructs with shardings.
          extra: ShapeDtypeStructs with shardings, or None to leave it out.

        Raises:
          Exception: it cannot be read.
        """

    def reject(self, name: str, problems: Problems) -> None:
        """Logs why a checkpoint cannot be read, so that the one before it is tried.

        Raises:
          CheckpointError: a persistent checkpoint may be intact and readable later.
        """

    def discard_after(self, step: int) -> None:
        """Deletes the checkpoints of later steps than the one the run resumes from."""

    def close(self) -> None:
        """Waits as `wait` does, and releases the folder."""
