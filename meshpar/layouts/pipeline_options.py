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

CHOICES = {
    "vocab": ("edge", PIPE),
    "save": ("inputs", "residuals"),
    "tick_loop": ("phases", "uniform"),
}
"""{option: its values} of the options with few values."""


def check_pipeline_options(
    pipe: int, options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Checks the values of `PIPELINE_OPTIONS`.

    Args:
      pipe: number of stages.
      options: {name: value}.
      defaults: {name: default}.

    Raises:
      LayoutError: an option without a pipeline, or a value that does not exist.
    """
    for name, value in options.items():
        if pipe == 1 and value != defaults[name]:
            raise LayoutError(
                f"{name}={shown(str(value))} is for pipelines, and pipe=1: add pipe=N, "
                f"or leave {name} out"
            )
    schedule, schedules = options["schedule"], ("auto", *SCHEDULES)
    if schedule not in schedules:
        known = nearest(shown(schedule), schedules)
        raise LayoutError(f"schedule={shown(schedule)!r} ({known})")
    for name, choices in CHOICES.items():
        if options[name] not in choices:
            value = shown(options[name])
            raise LayoutError(f"{name}={value!r}: use {' or '.join(choices)}")
    if not re.fullmatch("([0-9]{1,9}(/[0-9]{1,9})*)?", options["partition"]):
        raise LayoutError(
            f"partition={shown(options['partition'])!r}: write numbers of layers, as "
            "in 3/3/2"
        )
