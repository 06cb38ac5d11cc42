r"""Trains a model under a layout.

    meshpar run my_run.py:gpt --layout="data=2,fsdp=2,tensor=2" --steps=300

The same command resumes the run where it stopped, also under another layout.
"""

import dataclasses
from collections.abc import Sequence

from absl import flags

from meshpar.commands import command_line
from meshpar.commands.devices import start as start_devices
from meshpar.commands.devices import with_layout
from meshpar.runs.catalog import FILES_ALONE, Catalog
from meshpar.runs.setup import folder_of
from meshpar.runs.start import LAST_GOOD, NEWEST, Consent
from meshpar.runs.startup import DEVICES, SETUP, Startup
from meshpar.runs.trainer import Trainer

WORKDIR = flags.DEFINE_string("workdir", None, command_line.SETTINGS["workdir"].help)
CHECKPOINT_LOCAL_DIR = flags.DEFINE_string(
    "checkpoint_local_dir", None, command_line.SETTINGS["checkpoint_local_dir"].help
)
CHECK_REPLICAS = flags.DEFINE_integer(
    "check_replicas", None, "Steps between comparisons of copies; 0 for never."
)
command_line.limit(CHECK_REPLICAS, command_line.SETTINGS["check_replicas"].range)
START_ANEW = flags.DEFINE_bool(
    "start_anew",
    False,
    "Start at step 0 where the checkpoints are gone.",
)
ALLOW_CHANGES = flags.DEFINE_bool(
    "allow_changes", False, "Resume with other data, another seed or another length."
)
RESUME = flags.DEFINE_enum(
    "resume",
    None,
    [NEWEST, LAST_GOOD],
    "last_good skips what is not finite.",
)
FALLBACK_LAYOUTS = flags.DEFINE_string(
    "fallback_layouts",
    None,
    "Layouts for fewer processes, split by semicolons.",
)
PROFILE = flags.DEFINE_bool("profile", False, "Write a profiler trace of a few steps.")


TAKES = command_line.OF_RUNS
"""The shared flags that it reads."""


def main(_: Sequence[str]) -> int:
    """Trains, and returns the exit code."""
    with Startup() as startup:
        return _train(startup)


def _train(startup: Startup) -> int:
    startup.enter(DEVICES)
    config = command_line.config_from_flags()
    own = {
        "workdir": WORKDIR.value,
        "checkpoint_local_dir": CHECKPOINT_LOCAL_DIR.value,
        "check_replicas": CHECK_REPLICAS.value,
    }
    given = {name: value for name, value in own.items() if value is not None}
    config = dataclasses.replace(config, **given)
    started = start_devices(config, FALLBACK_LAYOUTS.value or "", folder_of(config))
    config = with_layout(config, started.layout)
    consent = Consent(
        start_anew=START_ANEW.value,
        changes=ALLOW_CHANGES.value,
        last_good=RESUME.value == LAST_GOOD,
    )
    startup.enter(SETUP)
    return Trainer(
        config,
        started.layout,
        started.devices,
        profile=PROFILE.value,
        consent=consent,
        fallbacks=started.fallbacks,
        can_grow=started.membership.can_grow,
        startup=startup,
        planned=started.planned,
    ).run()


def start(known: Catalog = FILES_ALONE) -> None:
    """Runs the command.

    Args:
      known: the recipes that it knows by name.
    """
    command_line.run(main, TAKES, known=known)


if __name__ == "__main__":
    start()
