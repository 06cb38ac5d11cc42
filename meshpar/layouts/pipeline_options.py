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


def check_pipeline_options(options: Mapping[str, Any]) -> None:
    """Raises LayoutError for values of `PIPELINE_OPTIONS` that do not exist.

    Args:
      options: {name: value}.
    """
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
