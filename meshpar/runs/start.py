"""The start of a run: restores the newest checkpoint, or initializes the state."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from meshpar.checkpoint.checkpoints import Checkpoints
from meshpar.errors import ConfigError
from meshpar.multihost import agree
from meshpar.runs.changes import changed_files, changes
from meshpar.runs.finite import FiniteCheck
from meshpar.runs.repeats import CAUSES
from meshpar.runs.run_record import RunRecord
from meshpar.runs.setup import Setup


class Consent(NamedTuple):
    """The consent of the user.

    Attributes:
      start_anew: a start at step 0 where the checkpoints of a run are gone.
      changes: going on with other data, another seed or length.
      last_good: going back to the last checkpoint that is finite.
    """

    start_anew: bool = False
    changes: bool = False
    last_good: bool = False


NO_CONSENT = Consent()

NEWEST, LAST_GOOD = "newest", "last_good"
"""Checkpoints to resume from: the newest one, or the last that is finite."""


class Start(NamedTuple):
    """The beginning of a run or of its resumption.

    Attributes:
      state: the training state.
      step: number of steps done before.
      position: number of samples used before.
      data_state: state of the data's iterator there, if it has one.
      notes: what restoring changed, for people.
      changes: settings that change the course of training from here.
      persistent: False if only local disks hold the step.
    """

    state: Any
    step: int = 0
    position: int = 0
    data_state: Any = None
    notes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    persistent: bool = True


def restore(
    setup: Setup,
    checkpoints: Checkpoints,
    record: RunRecord,
    consent: Consent,
    finite: FiniteCheck,
) -> Start:
    """Restores the newest checkpoint, or initializes the state; all processes call it.

    Args:
      setup: the run.
      checkpoints: those of its folder.
      record: the folder's record.
      consent: what the user agrees to.
      finite: looks at the restored state.

    Raises:
      MeshparError: the folder belongs to another run, no checkpoint in it can be read,
        or its checkpoints are gone.
    """
    program = setup.program
    restored = checkpoints.restore(
        setup.config.steps, finite.problem, last_good=consent.last_good
    )
    if not restored:
        record.start_anew(consent.start_anew)
        return Start(program.init(setup.config.seed))
    metadata, step = restored.metadata, int(restored.state.step)
    found = changes(metadata["config"], setup.config)
    files = changed_files(metadata.get("code", {}), setup.config.code)
    is_same = bool(setup.config.code) and not (files or any(found))
    identity = _changed_identity(setup, metadata, consent.changes, is_same)
    if found.of_model:
        raise ConfigError(
            f"the run in {setup.folder} trains another model: "
            f"{'; '.join(found.of_model)}; use another --workdir, or the flags of that "
            "run"
        )
    of_training = (*identity, *found.of_training)
    notes = [restored.note] if restored.note else []
    notes += _notes(step, files, found.neutral, of_training)
    if is_same and _is_other_step(setup, metadata):
        notes.append(
            f"WARNING: the step is another program than before step {step}, with the "
            "same files and settings: the model, the loss or the optimizer reads "
            f"{CAUSES}; make all of them of the settings"
        )
    if metadata["data"] != setup.identity["data"] and not identity:
        notes.append(
            f"step {step} holds an earlier version's fingerprint of its data; "
            "checkpoints from now on hold a new one"
        )
    if restored.persistent:
        record.saved()
    else:
        notes.append(
            f"step {step} comes from local disks; it is written to "
            f"{setup.folder / 'checkpoints'} as well, which does not hold it"
        )
    position = metadata["position"]
    agree.check_fingerprint({"data position": position})
    state = program.as_stored(restored.state, restored.extra)
    return Start(
        state,
        step,
        position,
        metadata.get("data_state"),
        tuple(notes),
        of_training,
        restored.persistent,
    )


def _notes(
    step: int,
    files: Sequence[str],
    neutral: Sequence[str],
    of_training: Sequence[str],
) -> Iterator[str]:
    """Generates what has changed since a step, for people."""
    if files:
        yield f"the code has changed since step {step}: {', '.join(files)}"
    if neutral:
        yield f"changed since step {step}: {'; '.join(neutral)}"
    if of_training:
        lines = "\n  ".join(of_training)
        yield f"WARNING: from step {step} on the run trains in another way:\n  {lines}"


def _is_other_step(setup: Setup, metadata: Mapping[str, Any]) -> bool:
    """Whether the same jax on the same devices lowers the step to something else."""
    own = setup.step_program
    before = metadata.get("program", own)  # An earlier version has none.
    return before != own and own == before | {"hash": own["hash"]}


def _changed_identity(
    setup: Setup, metadata: Mapping[str, Any], allowed: bool, is_same: bool
) -> list[str]:
    """Changes of data, length and seed as lines "name: before -> after".

    Args:
      setup: the run.
      metadata: of the checkpoint.
      allowed: whether the user agrees to changes.
      is_same: whether files and settings are those of the checkpoint.

    Raises:
      ConfigError: there is one, and it is not allowed.
    """
    changed = []
    for name, after in setup.identity.items():
        before = metadata.get(name, after)  # An earlier version may lack it.
        if before == after:
            continue
        if name == "data" and setup.run.data.has_fingerprint(before):
            continue
        if not allowed and is_same:
            raise ConfigError(
                f"the run in {setup.folder} has {name}={before}, and the same files "
                f"with the same settings now give {name}={after}: they read {CAUSES}. "
                "Make everything from the settings and use another --workdir, or add "
                "--allow_changes to go on with other samples"
            )
        if not allowed:
            raise ConfigError(
                f"the run in {setup.folder} has {name}={before}, this command has "
                f"{name}={after}; use another --workdir, or the flags of that run, or "
                "add --allow_changes to go on with the samples of this command"
            )
        changed.append(f"{name}: {before!r} -> {after!r}")
    return changed
