"""Options of a layout that only pipelines have."""

import re
from collections.abc import Mapping
from typing import Any

from meshpar.errors import LayoutError, nearest, shown
from meshpar.layouts.axes import PIPE
from meshpar.schedules.published import SCHEDULES

PIPELINE_OPTIONS = (
    "schedule",
    "virtual_stages",
    "partition",
    "vocab",
    "save",
    "tick_loop",
)
"""Fields of `Layout`; a layout without a pipeline has their defaults."""

AUTO = "auto"
"""Value of the options that follow from the model and from other options."""

EDGE, INPUTS, RESIDUALS = "edge", "inputs", "residuals"

CHOICES = {
    "vocab": (AUTO, EDGE, PIPE),
    "save": (AUTO, INPUTS, RESIDUALS),
    "tick_loop": ("phases", "uniform"),
}
"""{option: its values} of the options with few values."""


UNUSED = {"vocab": EDGE, "save": INPUTS}
"""{option: the value by which nothing is spread over stages, nor saved beside their
inputs}: what layouts without a pipeline do, and schedules that can do nothing else."""


def check_pipeline_options(options: Mapping[str, Any]) -> None:
    """Raises LayoutError for values of `PIPELINE_OPTIONS` that do not exist.

    Args:
      options: {name: value}.
    """
    schedule, schedules = options["schedule"], (AUTO, *SCHEDULES)
    if schedule not in schedules:
        known = nearest(shown(schedule), schedules)
        raise LayoutError(f"schedule={shown(schedule)!r} ({known})")
    for name, choices in CHOICES.items():
        if options[name] not in choices:
            value = shown(options[name])
            raise LayoutError(f"{name}={value!r}: use {_either(choices)}")
    if not re.fullmatch("([0-9]{1,9}(/[0-9]{1,9})*)?", options["partition"]):
        raise LayoutError(
            f"partition={shown(options['partition'])!r}: write numbers of layers, as "
            "in 3/3/2"
        )


def _either(choices: tuple[str, ...]) -> str:
    """The choices in words: "a, b or c"."""
    *others, last = choices
    return f"{', '.join(others)} or {last}"
