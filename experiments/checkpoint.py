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

from absl import flags

from experiments import recipes
from experiments.interchange import runs
from meshpar.commands import checkpoint, command_line
from meshpar.errors import CheckpointError
from meshpar.runs.stored import newest_checkpoint

EXPORT = flags.DEFINE_enum(
    "export", None, ["safetensors"], "Writes the newest weights for transformers."
)
TO = flags.DEFINE_string("to", None, "Folder for --export; DIR/huggingface by default.")
IMPORT = flags.DEFINE_string(
    "import", None, "Starts a run in DIR with the weights in this folder."
)
flags.adopt_module_key_flags(checkpoint)


def main(arguments: Sequence[str]) -> int:
    """Lists, answers or converts; returns the exit code, 1 for "cannot resume"."""
    actions = [checkpoint.CAN_RESUME.value, EXPORT.value, IMPORT.value]
    if sum(action is not None for action in actions) > 1:
        raise CheckpointError("give one of --can_resume, --export and --import")
    if TO.value is not None and EXPORT.value is None:
        raise CheckpointError(f"--to={TO.value} goes with --export=safetensors; add it")
    if len(arguments) != 2 or (EXPORT.value is None and IMPORT.value is None):
        return checkpoint.main(arguments)
    run = pathlib.Path(arguments[1])
    command_line.refuse_unread(*(command_line.OF_CONFIG if IMPORT.value else ()))
    if IMPORT.value is not None:
        config = recipes.of_decoder(command_line.config_from_flags())
        command_line.use_cpu()
        runs.import_weights(run, pathlib.Path(IMPORT.value), config)
        return 0
    newest = newest_checkpoint(arguments[1])
    command_line.use_cpu()
    runs.export(newest, pathlib.Path(TO.value or run / "huggingface"))
    return 0


if __name__ == "__main__":
    command_line.run(
        main, command_line.OF_CONFIG, arguments=True, known=recipes.CATALOG
    )
