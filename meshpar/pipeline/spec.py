"""The pipeline of a layout: its schedule and its partition of the layers."""

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
      schedule: the tick of every operation.
      partition: the layers of every stage.
      why: the choice of schedule=auto and its reason; "" for a named schedule.
    """

    schedule: Schedule
    partition: Partition
    why: str


def make_spec(layout: Layout, depth: int) -> PipelineSpec:
    """Makes the schedule and the partition of a layout.

    Args:
      layout: the layout; pipe is above 1.
      depth: layers of the model.

    Raises:
      LayoutError: the schedule or the partition does not fit stages, microbatches or
        depth.
    """
    stages, num, chunks = layout.pipe, layout.microbatches, layout.virtual_stages
    name, why = layout.schedule, ""
    if name == "auto":
        fits = chunks > 1 and depth % (stages * chunks) == 0 and num % stages == 0
        name = "interleaved" if fits else "1f1b"
        reason = (
            f"virtual_stages={chunks}: {stages * chunks} chunks divide {depth} layers, "
            f"and pipe={stages} divides microbatches={num}"
        )
        if chunks == 1:
            reason = "virtual_stages=1"
        elif not fits:
            reason = (
                f"virtual_stages={chunks} left aside, because {stages * chunks} chunks "
                f"have to divide {depth} layers, and pipe={stages} microbatches={num}"
            )
            if layout.partition:
                raise LayoutError(
                    f"partition={layout.partition}: schedule=auto would take 1f1b with "
                    f"{reason}; write schedule=interleaved, or leave out virtual_stages"
                )
            chunks = 1
        why = f"schedule=auto took {name} ({reason})"
    sizes = tuple(map(int, layout.partition.split("/"))) if layout.partition else ()
    return PipelineSpec(
        make_schedule(name, stages, num, chunks),
        make_partition(depth, stages, chunks, sizes),
        why,
    )
