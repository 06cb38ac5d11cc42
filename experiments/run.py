r"""Trains a model under a layout.

    python -m experiments.run --layout="data=2,fsdp=2,tensor=2" --steps=300

The same command resumes the run where it stopped, also under another layout.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # Imports make objects that stay; `Startup` ends this.

import dataclasses
from collections.abc import Sequence

from absl import flags

from experiments import command_line
from experiments.devices import start, with_layout
from experiments.recipes.config import SETTINGS
from meshpar.runs.setup import folder_of
from meshpar.runs.start import Consent
from meshpar.runs.startup import DEVICES, SETUP, Startup
from meshpar.runs.trainer import Trainer

WORKDIR = flags.DEFINE_string("workdir", None, SETTINGS["workdir"].help)
CHECKPOINT_LOCAL_DIR = flags.DEFINE_string(
    "checkpoint_local_dir", None, SETTINGS["checkpoint_local_dir"].help
)
START_ANEW = flags.DEFINE_bool(
    "start_anew",
    False,
    "Start at step 0 where the checkpoints are gone.",
)
ALLOW_CHANGES = flags.DEFINE_bool(
    "allow_changes", False, "Resume with other data, another seed or another length."
)
FALLBACK_LAYOUTS = flags.DEFINE_string(
    "fallback_layouts",
    None,
    "Layouts for fewer processes, split by semicolons.",
)
PROFILE = flags.DEFINE_bool("profile", False, "Write a profiler trace of a few steps.")


def main(_: Sequence[str]) -> int:
    """Trains, and returns the exit code."""
    with Startup() as startup:
        return _train(startup)


def _train(startup: Startup) -> int:
    startup.enter(DEVICES)
    config = command_line.config_from_flags()
    folders = {
        "workdir": WORKDIR.value,
        "checkpoint_local_dir": CHECKPOINT_LOCAL_DIR.value,
    }
    given = {name: value for name, value in folders.items() if value is not None}
    config = dataclasses.replace(config, **given)
    started = start(config, FALLBACK_LAYOUTS.value or "", folder_of(config))
    config = with_layout(config, started.layout)
    consent = Consent(start_anew=START_ANEW.value, changes=ALLOW_CHANGES.value)
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


if __name__ == "__main__":
    command_line.run(main, command_line.OF_RUNS)
