r"""Evaluates the newest checkpoint of a run on the run's evaluation data.

    meshpar score runs/my_run.gpt --recipe=my_run.py:gpt
    meshpar score runs/my_run.gpt --recipe=my_run.py:gpt --layout="fsdp=2,tensor=4"

The recipe of a file has to be named, as its code is run. The metrics are those that the
run logs when it evaluates.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from meshpar.commands import command_line
from meshpar.commands.devices import start_devices
from meshpar.errors import ConfigError
from meshpar.lowering.state import Metrics
from meshpar.metrics import WEIGHT
from meshpar.runs import programs, stored
from meshpar.runs.catalog import FILES_ALONE, Catalog
from meshpar.runs.changes import changed_files
from meshpar.runs.config import RunConfig, check_setting
from meshpar.runs.data import Place

TAKES = (
    command_line.RECIPE,
    command_line.LAYOUT,
    command_line.BATCH_SIZE,
    *command_line.OF_DEVICES,
)
"""The shared flags that it reads."""


def config_from_flags(config: RunConfig) -> RunConfig:
    """A run's configuration as one model, with the changes of the flags.

    Raises:
      MeshparError: a layout or a batch size that cannot be.
    """
    config = stored.as_one_model(config, command_line.LAYOUT.value)
    size = command_line.BATCH_SIZE.value
    if size is None:
        return config
    check_setting("batch_size", size)
    return dataclasses.replace(config, batch_size=size)


def main(arguments: Sequence[str]) -> int:
    """Evaluates, and returns the exit code."""
    if len(arguments) != 2:
        command = " ".join(command_line.program("score"))
        raise ConfigError(f"give one folder: {command} DIR")
    checkpoint = stored.newest_checkpoint(arguments[1])
    named = command_line.named_recipe()
    config = stored.stored_config(checkpoint, command_line.catalog(), named)
    changed = changed_files(checkpoint.metadata.get("code", {}), config.code)
    layout, devices = start_devices(config := config_from_flags(config))
    config, run = config.prepared()
    if not run.evaluates:
        raise ConfigError(
            f"{config.recipe} has no data to evaluate on; add evaluation= to its Run"
        )
    program = programs.make_program(config, run, layout, devices)
    place = Place(config.batch_size, program.batch_rows, config.seed)
    with config.blaming_recipe():
        held_out = run.evaluation.evaluation_batches(place, config.evaluation_batches)
    params = stored.weights_for(program, checkpoint)

    def evaluate(batch: Any, rows: int | None) -> Metrics:
        return program.evaluate_params(params, batch, rows)

    found = held_out.metric_sums(program, evaluate).result()
    if jax.process_index() == 0:
        if changed:
            print(f"changed since the checkpoint: {', '.join(changed)}")
        print(f"step {checkpoint.step} of {arguments[1]} under {layout}")
        batches = len(held_out.batches) + (held_out.rest is not None)
        number = f"{batches} held-out batch(es) of at most {config.batch_size}"
        shown = (f"{k} {x}" for k, x in found.items() if not _is_weight(k))
        print(f"{number}: {', '.join(shown)}")
    return 0


def _is_weight(name: str) -> bool:
    return name.rpartition("/")[2] == WEIGHT


def start(known: Catalog = FILES_ALONE) -> None:
    """Runs the command.

    Args:
      known: the recipes that it knows by name.
    """
    command_line.run(main, TAKES, arguments=True, known=known)


if __name__ == "__main__":
    start()
