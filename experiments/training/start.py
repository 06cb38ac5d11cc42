"""The start of a run: restores the newest checkpoint, or initializes the state."""

from typing import Any, NamedTuple

from experiments.recipes.errors import ConfigError
from experiments.training.run_record import RunRecord
from experiments.training.setup import Setup
from meshpar.checkpoint.checkpoints import Checkpoints
from meshpar.multihost import agree


class Start(NamedTuple):
    """The beginning of a run or of its resumption.

    Attributes:
      state: the training state.
      step: number of steps done before.
      position: number of samples used before.
      notes: what restoring changed, for people.
      persistent: False if only local disks hold the step.
    """

    state: Any
    step: int = 0
    position: int = 0
    notes: tuple[str, ...] = ()
    persistent: bool = True


def restore(
    setup: Setup, checkpoints: Checkpoints, record: RunRecord, start_anew: bool
) -> Start:
    """Restores the newest checkpoint, or initializes the state; all processes call it.

    Args:
      setup: the run.
      checkpoints: those of its folder.
      record: the folder's record.
      start_anew: whether to initialize the state where checkpoints are gone.

    Raises:
      MeshparError: the folder belongs to another run, no checkpoint in it can be read,
        or its checkpoints are gone.
    """
    program = setup.program
    restored = checkpoints.restore()
    if not restored:
        record.start_anew(start_anew)
        return Start(program.init(setup.config.seed))
    metadata = restored.metadata
    for name, value in setup.identity.items():
        if metadata[name] != value:
            raise ConfigError(
                f"the run in {setup.folder} has {name}={metadata[name]}, this command "
                f"has {name}={value}; use another --workdir, or the flags of that run"
            )
    if restored.persistent:
        record.saved()
    step, position = int(restored.state.step), metadata["position"]
    agree.check_fingerprint({"data position": position})
    state = program.as_stored(restored.state, restored.extra)
    notes = [restored.note] if restored.note else []
    if not restored.persistent:
        notes.append(
            f"step {step} comes from local disks; it is written to "
            f"{setup.folder / 'checkpoints'} as well, which does not hold it"
        )
    return Start(state, step, position, tuple(notes), restored.persistent)
