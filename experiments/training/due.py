"""Says whether an evaluation or a checkpoint is due after a step."""

from typing import NamedTuple

from experiments.recipes.config import Config


class Due(NamedTuple):
    """The actions that are due after a step."""

    evaluation: bool
    checkpoint: bool
    local_checkpoint: bool

    @classmethod
    def after(cls, step: int, config: Config) -> "Due":
        """The actions after a step of a run."""
        last = step >= config.steps
        every = config.checkpoint_local_every or config.checkpoint_every
        return cls(
            evaluation=last or step % config.evaluate_every == 0,
            checkpoint=last or step % config.checkpoint_every == 0,
            local_checkpoint=bool(config.checkpoint_local_dir) and step % every == 0,
        )
