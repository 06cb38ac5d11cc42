"""A report of one pipeline: its schedule, bubble, buffers and messages, as data."""

import dataclasses

from meshpar.pipeline.executor import Executor
from meshpar.pipeline.spec import PipelineSpec
from meshpar.schedules.published import formula


@dataclasses.dataclass(frozen=True)
class PipelineReport:
    """The pipeline of a layout.

    Attributes:
      schedule: its name.
      stages: number of stages.
      microbatches: number of microbatches.
      chunks: chunks of layers per stage.
      layers: layers of every chunk, in the order of the model.
      ops: (F, B or W; microbatch; chunk; stage; tick) of everything that runs.
      text: the schedule as text, stages down and ticks across.
      ticks: ticks of one step.
      bubble: share of the time in which a stage waits, from the table; B takes twice
        as long as F, and as long as F where W is split off.
      formula: the bubble by the papers' formula, and the formula; None for a schedule
        of one's own.
      in_flight: most stage inputs that each stage keeps.
      saved_bytes: bytes on one device that are kept between F and B.
      sends: messages of one stage to its neighbours per step.
    """

    schedule: str
    stages: int
    microbatches: int
    chunks: int
    layers: tuple[int, ...]
    ops: tuple[tuple[str, int, int, int, int], ...]
    text: str
    ticks: int
    bubble: float
    formula: tuple[float, str] | None
    in_flight: tuple[int, ...]
    saved_bytes: int
    sends: int


def pipeline_report(
    spec: PipelineSpec, executor: Executor, saved_bytes: int
) -> PipelineReport:
    """Reports a pipeline.

    Args:
      spec: schedule and partition.
      executor: runs the schedule.
      saved_bytes: bytes on one device that are kept between F and B.
    """
    schedule = spec.schedule
    return PipelineReport(
        schedule=schedule.name,
        stages=schedule.num_stages,
        microbatches=schedule.num_microbatches,
        chunks=schedule.num_chunks,
        layers=spec.partition.sizes,
        ops=tuple((kind, *op, tick) for kind, op, tick in schedule.placed()),
        text=str(schedule),
        ticks=schedule.num_ticks,
        bubble=schedule.bubble(),
        formula=formula(schedule),
        in_flight=tuple(schedule.in_flight()),
        saved_bytes=saved_bytes,
        sends=executor.num_sends + executor.num_gradient_sends,
    )
