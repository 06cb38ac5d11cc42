r"""Checkpoints of a run: lists them, or asks whether a layout can resume.

    meshpar checkpoint runs/my_run.gpt
    meshpar checkpoint runs/my_run.gpt --can_resume="fsdp=4" --recipe=my_run.py:gpt

The recipe of a file has to be named, as its code is run. The command uses only the CPU.
"""

from collections.abc import Sequence

import jax
from absl import flags

from meshpar.checkpoint import persistent
from meshpar.commands import command_line
from meshpar.commands.reports.checkpoints import print_checkpoints
from meshpar.errors import CheckpointError, MeshparError, RecipeError
from meshpar.layouts.layout import parse
from meshpar.mesh import simulate
from meshpar.runs import programs
from meshpar.runs.catalog import FILES_ALONE, Catalog
from meshpar.runs.config import with_mode
from meshpar.runs.modes import LOCAL_SGD, SYNCHRONOUS
from meshpar.runs.stored import checkpoint_folder, newest_checkpoint, stored_config

CAN_RESUME = flags.DEFINE_string(
    "can_resume", None, "A layout: says whether it could resume the run, or why not."
)


TAKES = (command_line.RECIPE,)
"""The shared flags that it reads."""


def why_not(checkpoint: persistent.StoredCheckpoint, text: str) -> str:
    """A reason why a layout cannot resume from a checkpoint; "" if it can.

    Args:
      checkpoint: the checkpoint, with metadata.
      text: the layout string.

    Raises:
      RecipeError: code of the recipe raises, under whatever layout.
    """
    named = command_line.named_recipe()
    config = stored_config(checkpoint, command_line.catalog(), named)
    layout = parse(text)
    mode = LOCAL_SGD if layout.replica > 1 else SYNCHRONOUS
    if config.optimizer_mode != mode:
        config = with_mode(config, mode)
    command_line.use_cpu()
    simulate(layout.num_devices)
    devices = jax.devices()[: layout.num_devices]
    try:
        config, run = config.prepared()
        program = programs.make_program(config, run, layout, devices)
    except RecipeError:
        raise
    except MeshparError as error:
        return str(error)
    return persistent.reason_not_restorable(
        checkpoint, program.portable_state, layout.replica
    )


def main(arguments: Sequence[str]) -> int:
    """Lists or answers; returns the exit code, 1 for "cannot resume"."""
    if len(arguments) != 2:
        command = " ".join(command_line.program("checkpoint"))
        raise CheckpointError(f"give one folder: {command} DIR")
    if CAN_RESUME.value == "":
        raise CheckpointError("--can_resume=: write a layout, such as fsdp=8")
    if CAN_RESUME.value is None:
        command_line.refuse_unread()
        folder = checkpoint_folder(arguments[1])
        checkpoints = persistent.find_checkpoints(folder)
        print_checkpoints(checkpoints, folder.parent / "corrupt")
        return 0
    command_line.refuse_unread(command_line.RECIPE)
    checkpoint = newest_checkpoint(arguments[1])
    if reason := why_not(checkpoint, CAN_RESUME.value):
        print(f"no: {reason}")
        return 1
    print(f"yes: {CAN_RESUME.value} can go on from step {checkpoint.step}")
    return 0


def start(known: Catalog = FILES_ALONE) -> None:
    """Runs the command.

    Args:
      known: the recipes that it knows by name.
    """
    command_line.run(main, TAKES, arguments=True, known=known)


if __name__ == "__main__":
    start()
