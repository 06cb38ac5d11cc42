"""Configurations of runs, as their checkpoints store them."""

from meshpar.checkpoint import persistent
from meshpar.errors import CheckpointError
from meshpar.runs.catalog import Catalog
from meshpar.runs.config import RunConfig


def stored_config(
    checkpoint: persistent.StoredCheckpoint, known: Catalog, recipe: str = ""
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
            f"{checkpoint.path} holds no configuration: it was not written by "
            "experiments.run; give the folder of a run"
        )
    return known.stored(checkpoint.metadata["config"], recipe)
