"""Changes between a checkpoint and the run that resumes it: its settings, its code.

Every change is listed. One of what the model computes is refused by the run, one of the
course of training is a warning. A field that is new here counts as one of training.
"""

import itertools
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
    """Compares a checkpoint's configuration with a run's configuration.

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


def changed_files(saved: Mapping[str, str] | str, now: Mapping[str, str]) -> list[str]:
    """Files of the user's code that differ from a checkpoint's, in words.

    Args:
      saved: {file: hash} of the checkpoint; earlier versions kept the hash of the
        recipe's own file alone.
      now: {file: hash} of the run, the recipe's own file first.
    """
    if isinstance(saved, str):
        now = dict(itertools.islice(now.items(), 1))
        saved = dict.fromkeys(now, saved)
    words = []
    for file in {**now, **saved}:
        if file not in saved:
            words.append(f"{file} is new")
        elif file not in now:
            words.append(f"{file} is gone")
        elif saved[file] != now[file]:
            words.append(file)
    return words
