"""Changes between the configuration of a checkpoint and that of the run it resumes.

Every change is listed. One of what the model computes is refused by the run, one of the
course of training is a warning. A field that is new here counts as one of training.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.recipes.config import Config, from_dict, values_of

_NEUTRAL = {
    *("recipe", "layout", "lowering", "workdir", "watchdog_seconds", "sample_tokens"),
    *("evaluate_every", "evaluation_batches", "checkpoint_every", "keep_checkpoints"),
    *("checkpoint_local_dir", "checkpoint_local_every", "model.loss_block"),
    *("data.path", "data.tokenizer"),
}
"""Fields that change no step; the fingerprint of the data compares its content."""
_IDENTITY = {"seed", "data.held_out", "model.length"}
"""Fields that are compared on their own, since they decide which samples come next."""
_TRAINING_ONLY = {"model.dropout", "model.init_std"}
"""Fields of the model that change its training, but no evaluation of its weights."""


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


def changes(saved: Mapping[str, Any], config: Config) -> Changes:
    """Compares a checkpoint's configuration with that of a run.

    Args:
      saved: the configuration as a checkpoint stores it.
      config: that of the run, with the vocabulary of the data.
    """
    found = Changes([], [], [])
    try:
        before = dict(values_of(from_dict(saved)))
    except ValueError as error:
        found.of_training.append(f"the settings cannot be compared: {error}")
        return found
    for name, after in values_of(config):
        if before[name] == after or name in _IDENTITY:
            continue
        kind = found.of_training
        if name in _NEUTRAL:
            kind = found.neutral
        elif name.startswith("model.") and name not in _TRAINING_ONLY:
            kind = found.of_model
        kind.append(f"{name}: {before[name]!r} -> {after!r}")
    return found
