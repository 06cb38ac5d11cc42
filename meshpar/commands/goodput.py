r"""Goodput of a run: the share of its time that went into steps that count.

    meshpar goodput runs/my_run.gpt

Prints where the time of every start went, and draws it. The run may still go on.
"""

import json
import pathlib
from collections.abc import Sequence

from absl import flags

from meshpar.commands import command_line
from meshpar.commands.outputs import check_file
from meshpar.commands.reports import goodput as reports
from meshpar.commands.reports import pictures
from meshpar.errors import CheckpointError
from meshpar.runs import goodput
from meshpar.runs.catalog import FILES_ALONE, Catalog
from meshpar.runs.time_record import RECORD

PNG = flags.DEFINE_string(
    "png", None, "File of the picture; goodput.png in the run's folder by default."
)
JSON = flags.DEFINE_bool("json", False, "Print JSON in place of the table.")


def main(arguments: Sequence[str]) -> int:
    """Prints and draws the goodput of a run's folder."""
    if len(arguments) != 2:
        command = " ".join(command_line.program("goodput"))
        raise CheckpointError(f"give one folder: {command} DIR")
    folder = pathlib.Path(arguments[1])
    found = goodput.read(folder)
    if not found.starts:
        raise CheckpointError(
            f"{folder} holds no {RECORD}; give the folder of a run, which writes it"
        )
    path = PNG.value or str(folder / "goodput.png")
    pictures.check_format(path)
    check_file(path, "--png")
    reports.figure(found).savefig(path, dpi=110)
    if JSON.value:
        print(json.dumps(reports.as_dict(found)))
    else:
        reports.print_table(found)
        print(f"picture: {path}")
    return 0


def start(known: Catalog = FILES_ALONE) -> None:
    """Runs the command.

    Args:
      known: the recipes that it knows by name.
    """
    command_line.run(main, arguments=True, known=known)


if __name__ == "__main__":
    start()
