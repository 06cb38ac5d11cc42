"""The pipeline that a layout asks for: its schedule, and which layers a stage holds."""

import dataclasses

from meshpar.errors import LayoutError
from meshpar.layouts.layout import Layout
from meshpar.pipeline.partition import Partition, make_partition
from meshpar.schedules.published import make_schedule
from meshpar.schedules.table import Schedule


@dataclasses.dataclass(frozen=True)
class PipelineSpec:
    """A layout's pipeline for a model of some depth.

    Attributes:
      schedule: when every operation runs.
      partition: which layers every stage holds.
      why: what schedule=auto took, and why; "" if the layout names its schedule.
    """

    schedule: Schedule
    partition: Partition
    why: str


def make_spec(layout: Layout, depth: int) -> PipelineSpec:
    """Makes the schedule and the partition that a layout asks for.

    Raises:
      LayoutError: a schedule or a partition that cannot be.
    """
    stages, num, chunks = layout.pipe, layout.microbatches, layout.virtual_stages
    name, why = layout.schedule, ""
    if name == "auto":
        rounds = chunks > 1 and depth % (stages * chunks) == 0 and num % stages == 0
        name = "interleaved" if rounds else "1f1b"
        reason = (
            f"virtual_stages={chunks}: {stages * chunks} chunks divide {depth} layers, "
            f"and pipe={stages} divides microbatches={num}"
        )
        if chunks == 1:
            reason = "virtual_stages=1"
        elif not rounds:
            reason = (
                f"virtual_stages={chunks} left aside, because {stages * chunks} chunks "
                f"have to divide {depth} layers, and pipe={stages} microbatches={num}"
            )
            if layout.partition:
                raise LayoutError(
                    f"partition={layout.partition}: schedule=auto would have "
                    f"{reason}; say schedule=interleaved, or leave virtual_stages out"
                )
            chunks = 1
        why = f"schedule=auto took {name} ({reason})"
    sizes = tuple(map(int, layout.partition.split("/"))) if layout.partition else ()
    return PipelineSpec(
        make_schedule(name, stages, num, chunks),
        make_partition(depth, stages, chunks, sizes),
        why,
    )
