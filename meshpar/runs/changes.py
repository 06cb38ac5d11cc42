"""Changes between the configuration of a checkpoint and that of the run it resumes.

Every change is listed. One of what the model computes is refused by the run, one of the
course of training is a warning. A field that is new here counts as one of training.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from meshpar.runs.config import OF_MODEL, OF_TRAINING, RunConfig, from_dict, values_of


class Changes(NamedTuple):
    """Changed fields as lines "name: before -> after".

    Attributes:
      of_model: fields that change what the model computes from the same weights.
      of_training: fields that change the course of training.
      neutral: fields that change no step.
    """

    of_model: list[str]
    of_training: list[str]
    neutral: list[str]


def changes(saved: Mapping[str, Any], config: RunConfig) -> Changes:
    """Compares a checkpoint's configuration with that of a run.

    Args:
      saved: the configuration as a checkpoint stores it.
      config: that of the run, with what the data says.
    """
    found = Changes([], [], [])
    try:
        before = dict(values_of(from_dict(saved, type(config))))
    except ValueError as error:
        found.of_training.append(f"the settings cannot be compared: {error}")
        return found
    kinds = {OF_MODEL: found.of_model, OF_TRAINING: found.of_training}
    for name, after in values_of(config):
        if before[name] == after or name in config.decides_samples:
            continue
        kind = kinds.get(config.kind_of_change(name), found.neutral)
        kind.append(f"{name}: {before[name]!r} -> {after!r}")
    return found
