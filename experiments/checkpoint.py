r"""Checkpoints of a run: lists them, asks whether a layout can resume, moves weights.

    python -m experiments.checkpoint runs/bytes-llama
    python -m experiments.checkpoint runs/bytes-llama --can_resume="fsdp=4,tensor=2"
    python -m experiments.checkpoint runs/bytes-llama --export=safetensors
    python -m experiments.checkpoint runs/new --import=FOLDER --recipe=gpt2-124m

It exports weights to folders of Hugging Face's transformers (GPT-2, Llama, Mixtral and
Qwen3-MoE), and imports weights from them. It uses only the CPU.
"""

import pathlib
from collections.abc import Sequence

import jax
from absl import flags

import meshpar
from experiments import command_line
from experiments.interchange import runs
from experiments.recipes import building
from experiments.recipes.config import with_mode
from experiments.recipes.modes import LOCAL_SGD, SYNCHRONOUS
from experiments.reports.checkpoints import print_checkpoints
from meshpar.checkpoint import persistent
from meshpar.errors import CheckpointError

CAN_RESUME = flags.DEFINE_string(
    "can_resume", None, "A layout: says whether it could resume the run, or why not."
)
EXPORT = flags.DEFINE_enum(
    "export", None, ["safetensors"], "Writes the newest weights for transformers."
)
TO = flags.DEFINE_string("to", None, "Folder for --export; DIR/huggingface by default.")
IMPORT = flags.DEFINE_string(
    "import", None, "Starts a run in DIR with the weights in this folder."
)


def folder_of(path: str) -> pathlib.Path:
    """The folder of checkpoints, given itself or the folder of its run.

    Raises:
      CheckpointError: there is no checkpoint.
    """
    run = pathlib.Path(path)
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    if not persistent.find_checkpoints(folder):
        raise CheckpointError(f"{path} holds no checkpoint; give the folder of a run")
    return folder


def why_not(checkpoint: persistent.StoredCheckpoint, text: str) -> str:
    """A reason why a layout cannot resume from a checkpoint; "" if it can.

    Args:
      checkpoint: the checkpoint, with metadata.
      text: the layout string.
    """
    config = runs.config_of(checkpoint)
    layout = meshpar.layouts.parse(text)
    mode = LOCAL_SGD if layout.replica > 1 else SYNCHRONOUS
    if config.optimizer_mode != mode:
        config = with_mode(config, mode)
    command_line.use_cpu()
    meshpar.simulate(layout.num_devices)
    devices = jax.devices()[: layout.num_devices]
    try:
        program = building.make_program(config, layout, devices)
    except meshpar.MeshparError as error:
        return str(error)
    return persistent.reason_not_restorable(
        checkpoint, program.portable_state, layout.replica
    )


def main(arguments: Sequence[str]) -> int:
    """Lists, answers or converts; returns the exit code, 1 for "cannot resume"."""
    if len(arguments) != 2:
        raise CheckpointError("give one folder: python -m experiments.checkpoint DIR")
    actions = [CAN_RESUME.value, EXPORT.value, IMPORT.value]
    if sum(action is not None for action in actions) > 1:
        raise CheckpointError("give one of --can_resume, --export and --import")
    if TO.value is not None and EXPORT.value is None:
        raise CheckpointError(f"--to={TO.value} goes with --export=safetensors; add it")
    if CAN_RESUME.value == "":
        raise CheckpointError("--can_resume=: write a layout, such as fsdp=8")
    run = pathlib.Path(arguments[1])
    command_line.refuse_unread(*(command_line.OF_CONFIG if IMPORT.value else ()))
    if IMPORT.value is not None:
        config = command_line.config_from_flags()
        command_line.use_cpu()
        runs.import_weights(run, pathlib.Path(IMPORT.value), config)
        return 0
    folder = folder_of(arguments[1])
    checkpoints = persistent.find_checkpoints(folder)
    if not any(actions):
        print_checkpoints(checkpoints, folder.parent / "corrupt")
        return 0
    complete = [checkpoint for checkpoint in checkpoints if not checkpoint.problem]
    if not complete:
        raise CheckpointError(
            f"no checkpoint in {folder} is complete; without flags this command lists "
            "them with their problems"
        )
    newest = complete[-1]
    if EXPORT.value is not None:
        command_line.use_cpu()
        runs.export(newest, pathlib.Path(TO.value or run / "huggingface"))
        return 0
    if reason := why_not(newest, CAN_RESUME.value):
        print(f"no: {reason}")
        return 1
    print(f"yes: {CAN_RESUME.value} can go on from step {newest.step}")
    return 0


if __name__ == "__main__":
    command_line.run(main, command_line.OF_CONFIG, arguments=True)
