r"""Says what lies in a run's folder, and whether a layout could go on from it.

    python -m experiments.checkpoint runs/bytes-llama
    python -m experiments.checkpoint runs/bytes-llama --can_resume="fsdp=4,tensor=2"

It needs no device but the CPU.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

import jax
import rich.console
import rich.table
from absl import flags

import meshpar
from experiments import building, command_line
from experiments.config import from_dict
from meshpar import durable
from meshpar.durable import Found
from meshpar.errors import CheckpointError

CAN_RESUME = flags.DEFINE_string(
    "can_resume", None, "A layout: says whether it could go on from here, or why not."
)


def folder_of(path: str) -> pathlib.Path:
    """The folder of checkpoints, given it or the run's.

    Raises:
      CheckpointError: there is none.
    """
    run = pathlib.Path(path)
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    if not durable.find(folder):
        raise CheckpointError(f"{path} holds no checkpoint; give the folder of a run")
    return folder


def print_list(found: Sequence[Found], corrupt: pathlib.Path) -> None:
    """Prints the checkpoints as a table."""
    table = rich.table.Table("step", "layout", "samples used", "bytes", "state")
    for one in found:
        about = one.metadata or {}
        layout, position = about.get("layout", "?"), about.get("position", "?")
        state = one.problem or "complete"
        table.add_row(
            str(one.step), str(layout), str(position), f"{one.num_bytes:,}", state
        )
    console = rich.console.Console(highlight=False)
    if not console.is_terminal:
        console.width = 140
    console.print(table)
    if corrupt.is_dir():
        names = ", ".join(sorted(path.name for path in corrupt.iterdir()))
        console.print(f"set aside as corrupt in {corrupt}: {names}", soft_wrap=True)


def why_not(found: Found, text: str) -> str:
    """Why a layout cannot go on from a checkpoint; "" if it can.

    Args:
      found: the checkpoint, with metadata.
      text: the layout.
    """
    config = from_dict(found.metadata["config"])
    layout = meshpar.layouts.parse(text)
    mode = "local_sgd" if layout.replica > 1 else "synchronous"
    if config.optimizer_mode != mode:
        fresh = type(config.local_sgd)()
        config = dataclasses.replace(config, optimizer_mode=mode, local_sgd=fresh)
    jax.config.update("jax_platforms", "cpu")
    meshpar.simulate(layout.num_devices)
    try:
        program = building.make_program(
            config, layout, jax.devices()[: layout.num_devices]
        )
    except meshpar.MeshparError as error:
        return str(error)
    return durable.why_not(found, program.portable_state, layout.replica)


def main(arguments: Sequence[str]) -> int:
    """Lists, or answers; returns the exit code, 1 for no."""
    if len(arguments) != 2:
        raise CheckpointError("give one folder: python -m experiments.checkpoint DIR")
    folder = folder_of(arguments[1])
    found = durable.find(folder)
    if CAN_RESUME.value is None:
        print_list(found, folder.parent / "corrupt")
        return 0
    usable = [one for one in found if not one.problem]
    if not usable:
        raise CheckpointError(f"no checkpoint in {folder} is complete")
    newest = usable[-1]
    if reason := why_not(newest, CAN_RESUME.value):
        print(f"no: {reason}")
        return 1
    print(f"yes: {CAN_RESUME.value} can go on from step {newest.step}")
    return 0


if __name__ == "__main__":
    command_line.run(main, arguments=True)
