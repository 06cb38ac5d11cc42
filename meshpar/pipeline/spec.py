"""The pipeline of a layout: its schedule and its partition of the layers."""

import dataclasses
import functools

from meshpar.errors import LayoutError
from meshpar.layouts.layout import Layout
from meshpar.layouts.refusals.combination import PipelineTraits
from meshpar.once import Once
from meshpar.pipeline.partition import Partition, make_partition
from meshpar.schedules.published import SCHEDULES, Maker, make_schedule
from meshpar.schedules.table import Schedule
from meshpar.schedules.ticks import Tables, compile_schedule
from meshpar.schedules.zero_bubble import FOLDED, in_lock_step


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

    @functools.cached_property
    def tables(self) -> Tables:
        """The schedule, compiled."""
        return compile_schedule(self.schedule)

    @functools.cached_property
    def bubble(self) -> float:
        """The bubble of the schedule."""
        return self.schedule.bubble()

    @functools.cached_property
    def evaluation_tables(self) -> Tables:
        """The schedule in lock step, of which evaluation runs the forward passes."""
        if not self.schedule.diverges:
            return self.tables
        return compile_schedule(in_lock_step(self.schedule))


def make_spec(layout: Layout, depth: int) -> PipelineSpec:
    """Makes the schedule and the partition of a layout.

    Args:
      layout: the layout; pipe is above 1.
      depth: layers of the model.

    Raises:
      LayoutError: the schedule or the partition does not fit stages, microbatches or
        depth.
    """
    chunks = layout.virtual_stages
    if chunks == 1:
        chunks = FOLDED.get(layout.schedule, 1)
    counts = layout.pipe, layout.microbatches, chunks
    # A custom schedule may be registered again under its name.
    maker, name = SCHEDULES.get(layout.schedule), layout.schedule
    locked = _needs_lock_step(layout)
    args = maker, name, *counts, layout.partition, depth, locked
    return _specs.of(args, lambda: _make_spec(*args))


def _needs_lock_step(layout: Layout) -> bool:
    """Whether all stages have to run the same operations of a tick."""
    return layout.moves_in_stages or (layout.fsdp > 1 and layout.zero_level > 1)


def pipeline_traits(layout: Layout, depth: int) -> PipelineTraits:
    """Facts of a layout's pipeline at which the table of refusals looks.

    Args:
      layout: the layout; pipe is above 1.
      depth: layers of the model.
    """
    try:
        spec = make_spec(layout, depth)
    except LayoutError as error:
        return PipelineTraits(layout.schedule, problem=str(error))
    return PipelineTraits(
        spec.schedule.name,
        asynchronous=spec.schedule.asynchronous,
        reorders_layers=spec.partition.moves,
    )


_specs = Once(512)
"""Specs by the arguments of `_make_spec`, once for layouts with equal pipelines."""


def _make_spec(
    maker: Maker | None,
    name: str,
    stages: int,
    num: int,
    chunks: int,
    partition: str,
    depth: int,
    locked: bool,
) -> PipelineSpec:
    """`make_spec` from the fields of a layout that it reads."""
    del maker  # It only tells schedules of one name apart.
    why = ""
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
            if partition:
                raise LayoutError(
                    f"partition={partition}: schedule=auto would take 1f1b with "
                    f"{reason}; write schedule=interleaved, or leave out virtual_stages"
                )
            chunks = 1
        why = f"schedule=auto took {name} ({reason})"
    sizes = tuple(map(int, partition.split("/"))) if partition else ()
    made = make_partition(depth, stages, chunks, sizes)  # First: it refuses at once.
    schedule = make_schedule(name, stages, num, chunks)
    if schedule.weight and locked:
        schedule = in_lock_step(schedule)
    made = dataclasses.replace(made, folded=schedule.folded)
    if num < stages and not schedule.asynchronous:
        idle = f"microbatches={num}: stages idle {schedule.bubble():.0%} of the step"
        remedy = f"microbatches={2 * stages} or more would keep them busy"
        why = "; ".join(filter(None, (why, f"{idle}, {remedy}")))
    return PipelineSpec(schedule, made, why)
