"""Contents of a run's checkpoints: its configuration and its weights."""

import dataclasses
import pathlib

import jax

from meshpar.arrays import Params
from meshpar.checkpoint import StoredCheckpoint, find_checkpoints, read_params
from meshpar.errors import CheckpointError
from meshpar.layouts import parse
from meshpar.layouts.axes import DATA, REPLICA
from meshpar.lowering.train_program import TrainProgram
from meshpar.runs.catalog import Catalog
from meshpar.runs.config import AUTO, RunConfig, with_mode
from meshpar.runs.modes import SYNCHRONOUS
from meshpar.runs.run_record import CHECKPOINTS


def checkpoint_folder(path: str) -> pathlib.Path:
    """The folder of checkpoints, given itself or the folder of its run.

    Raises:
      CheckpointError: there is no checkpoint.
    """
    run = pathlib.Path(path)
    folder = run / CHECKPOINTS if (run / CHECKPOINTS).is_dir() else run
    if not find_checkpoints(folder):
        raise CheckpointError(
            f"{path} holds no checkpoint; give the folder of a run, such as "
            "runs/my_run.net"
        )
    return folder


def newest_checkpoint(path: str) -> StoredCheckpoint:
    """The newest complete checkpoint of a run, given its folder or their folder.

    Raises:
      CheckpointError: there is none.
    """
    folder = checkpoint_folder(path)
    complete = [found for found in find_checkpoints(folder) if not found.problem]
    if not complete:
        raise CheckpointError(
            f"no checkpoint in {folder} is complete; the command checkpoint lists them "
            "with their problems"
        )
    return complete[-1]


def stored_config(
    checkpoint: StoredCheckpoint, known: Catalog, recipe: str = ""
) -> RunConfig:
    """The configuration of the run that wrote a checkpoint.

    Args:
      checkpoint: a complete checkpoint.
      known: the recipes that are known by name.
      recipe: another one that the user names, whose code may be run.

    Raises:
      MeshparError: it holds none, or one that this version does not understand.
    """
    if "config" not in checkpoint.metadata:
        raise CheckpointError(
            f"{checkpoint.path} holds no configuration: no run wrote it; give the "
            "folder of a run"
        )
    return known.stored(checkpoint.metadata["config"], recipe)


def as_one_model(config: RunConfig, layout: str | None) -> RunConfig:
    """The configuration of a run whose weights are used as one model.

    Args:
      config: of the run, in any mode.
      layout: its layout string; None for that of the run, whose replicas are averaged.

    Raises:
      LayoutError: a layout that cannot be read.
    """
    config = with_mode(config, SYNCHRONOUS)
    named = config.layout if config.layout != AUTO else ""
    parsed = parse(layout or named or f"{DATA}=1")
    if layout is None and parsed.replica > 1:
        data = {DATA: parsed.data * parsed.replica, REPLICA: 1}
        parsed = dataclasses.replace(parsed, **data)
    return dataclasses.replace(config, layout=str(parsed), lowering="")


def weights_for(program: TrainProgram, checkpoint: StoredCheckpoint) -> Params:
    """The weights of a checkpoint as a program stores them, without optimizer state.

    Raises:
      CheckpointError: they cannot be read.
    """
    params = read_params(checkpoint, program.portable_state.params)
    if program.layer_order is None:
        return params
    shardings = {path: x.sharding for path, x in program.abstract_params.items()}
    order = jax.jit(program.layer_order.as_stored, out_shardings=shardings)
    return order(params)
