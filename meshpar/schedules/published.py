"""The schedules that a layout can ask for by name: published ones, and your own.

Each is a function that returns a `Schedule` (`meshpar/schedules/table.py`).
"""

import re
from collections.abc import Callable, Mapping

from meshpar.errors import LayoutError, nearest, shown
from meshpar.schedules.check import problems
from meshpar.schedules.fused import gpipe, interleaved, one_f_one_b, pipedream
from meshpar.schedules.table import Schedule
from meshpar.schedules.zero_bubble import ZERO_BUBBLE

Maker = Callable[[int, int, int], Schedule]
"""(num_stages, num_microbatches, num_chunks) -> Schedule."""


MAX_PASSES = 2**16
"""Most forward passes of a schedule, which is a table with a row for each of them."""


def register(name: str) -> Callable[[Maker], Maker]:
    """Registers a custom schedule, so that a layout can ask for `schedule=NAME`.

        @schedules.register("custom")
        def custom(num_stages, num_microbatches, num_chunks):
            sizes = num_stages, num_microbatches, num_chunks
            return schedules.Schedule("custom", *sizes, forward={...}, backward={...})

    Args:
      name: letters, digits, "_", "-" and "."; a custom name may be registered again.

    Returns:
      A decorator for a function (num_stages, num_microbatches, num_chunks) -> Schedule.

    Raises:
      LayoutError: the name is one of meshpar's own, or cannot stand in a layout.
    """
    if name in PUBLISHED or name == "auto":
        raise LayoutError(f"schedule={name} is one of meshpar's: use another name")
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise LayoutError(
            f"schedule={name!r}: use a name of letters, digits, '_', '-' and '.' only"
        )

    def add(maker: Maker) -> Maker:
        SCHEDULES[name] = maker
        return maker

    return add


def make_schedule(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> Schedule:
    """Makes a registered schedule and checks it.

    Args:
      name: a key of `SCHEDULES`.
      num_stages: P, the size of the pipe axis.
      num_microbatches: M.
      num_chunks: V, chunks of layers per stage (virtual stages).

    Raises:
      LayoutError: an unknown name, sizes that the schedule does not support, or a table
        that cannot run, with its problems.
    """
    if name not in SCHEDULES:
        known = nearest(shown(name), ["auto", *SCHEDULES])
        raise LayoutError(f"schedule={shown(name)!r} ({known})")
    passes = num_stages * num_microbatches * num_chunks
    if passes > MAX_PASSES:
        raise LayoutError(
            f"pipe={num_stages}, microbatches={num_microbatches}, virtual_stages="
            f"{num_chunks} are {passes:,} forward passes of a chunk per step; use "
            f"sizes whose product is at most {MAX_PASSES:,}"
        )
    schedule = SCHEDULES[name](num_stages, num_microbatches, num_chunks)
    sizes = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    if sizes != (num_stages, num_microbatches, num_chunks):
        raise LayoutError(
            f"schedule={name} returned a table for (stages, microbatches, chunks) = "
            f"{sizes}, not {(num_stages, num_microbatches, num_chunks)}"
        )
    if lines := problems(schedule):
        more = [f"and {len(lines) - 10} more"] if len(lines) > 10 else []
        text = "\n  ".join([*lines[:10], *more])
        raise LayoutError(f"schedule={name} cannot run:\n  {text}")
    return schedule


PUBLISHED: Mapping[str, Maker] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    **ZERO_BUBBLE,
    "pipedream": pipedream,
}
"""Schedules from papers; their bubbles have closed forms."""

SCHEDULES: dict[str, Maker] = dict(PUBLISHED)
"""Schedules that a layout can ask for by `schedule=NAME`; `register` adds to them."""


def formula(schedule: Schedule) -> tuple[float, str] | None:
    """The bubble in closed form: (value, text such as "(P-1)/(M+P-1)").

    None for custom schedules. The formulas of zero-bubble schedules hold for M >= 2P.
    """
    if schedule.name not in PUBLISHED:
        return None
    twice = schedule.asynchronous or schedule.in_lock_step
    waves = 1 if schedule.in_lock_step else schedule.num_chunks
    waves *= 3 if schedule.weight else 1
    edge = (2 if twice else 1) * (schedule.num_stages - 1)
    edge_text = "2(P-1)" if twice else "P-1"
    text = f"{'' if waves == 1 else waves}M+{edge_text}"
    over = edge_text if twice else f"({edge_text})"
    return edge / (waves * schedule.num_microbatches + edge), f"{over}/({text})"
