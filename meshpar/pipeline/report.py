"""The report of one pipeline: schedule, bubble, buffers and sends, as data."""

import dataclasses

from meshpar.pipeline.phases import TickLoop
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
      ops: (F, B or W; microbatch; chunk; stage; tick) of all operations.
      text: the schedule as text, stages down and ticks across.
      ticks: ticks of one step.
      bubble: share of the time in which a stage waits, from the table; B takes twice
        as long as F, and as long as F where W is split off.
      formula: the bubble by the papers' formula, and the formula; None for a
        schedule that the user registered.
      in_flight: most stage inputs that each stage saves.
      saved_bytes: bytes on one device saved between F and B.
      sends: activations and gradients that one stage sends per step.
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
    spec: PipelineSpec, loop: TickLoop, saved_bytes: int
) -> PipelineReport:
    """Makes the report of a pipeline.

    Args:
      spec: schedule and partition.
      loop: the schedule's ticks, by phases.
      saved_bytes: bytes on one device saved between F and B.
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
        sends=loop.num_activation_sends + loop.num_gradient_sends,
    )
