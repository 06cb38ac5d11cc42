"""The checkpoints of a run as a table."""

import pathlib
from collections.abc import Sequence

import rich.table

from meshpar.checkpoint import persistent
from meshpar.commands.reports import terminal


def print_checkpoints(
    checkpoints: Sequence[persistent.StoredCheckpoint], corrupt: pathlib.Path
) -> None:
    """Prints the checkpoints, and those that were set aside as corrupt.

    Args:
      checkpoints: those in the run's folder.
      corrupt: the folder of corrupt checkpoints; it may not exist.
    """
    table = rich.table.Table("step", "layout", "samples used", "bytes", "state")
    for checkpoint in checkpoints:
        metadata = checkpoint.metadata or {}
        table.add_row(
            str(checkpoint.step),
            str(metadata.get("layout", "?")),
            str(metadata.get("position", "?")),
            f"{checkpoint.num_bytes:,}",
            checkpoint.problem or "complete",
        )
    console = terminal.wide_console()
    console.print(table)
    if corrupt.is_dir():
        names = ", ".join(sorted(path.name for path in corrupt.iterdir()))
        console.print(f"set aside as corrupt in {corrupt}: {names}", soft_wrap=True)
