"""What a layout does to a model: specs, bytes, collectives, warnings, as data.

Everything comes from the plan, the contract and the compiled program; no accelerator is
needed, only its compiler (`mesh.topology`).
"""

import dataclasses
from typing import Any

import numpy as np

from meshpar.contracts.collective import Collective
from meshpar.contracts.compiler_log import rematerialized
from meshpar.contracts.contract import DeclaredCollective
from meshpar.explain.memory import Memory, predict_memory, saved_bytes
from meshpar.explain.warnings import collective_warnings
from meshpar.layouts.plan import LeafPlan
from meshpar.local_sgd.contract import busiest
from meshpar.local_sgd.program import LocalProgram
from meshpar.lowering.auto import peak_bytes
from meshpar.lowering.program import TrainProgram
from meshpar.pipeline.lowering import PipelineLowering
from meshpar.schedules.published import formula


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """The collectives of one kind over the same axes, declared and found.

    Attributes:
      kind: as `compiled.Collective.kind`.
      axes: mesh axes.
      declared_bytes: bytes that one device sends per step, as declared.
      bounded: whether the declared bytes are an upper bound.
      found_bytes: the same, as compiled.
      exposed_bytes: the part of them that no compute hides.
      executions: how often they run per step, as compiled.
      why: the reasons declared.
    """

    kind: str
    axes: tuple[str, ...]
    declared_bytes: float
    bounded: bool
    found_bytes: float
    exposed_bytes: float
    executions: int
    why: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Pipeline:
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
      formula: the same from the papers' formula, and the formula; None for a schedule
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


def _pipeline(program: TrainProgram) -> Pipeline | None:
    lowering = program.lowering
    if not isinstance(lowering, PipelineLowering):
        return None
    made, executor = lowering.arrangement, lowering.executor
    s = made.schedule
    return Pipeline(
        schedule=s.name,
        stages=s.num_stages,
        microbatches=s.num_microbatches,
        chunks=s.num_chunks,
        layers=made.partition.sizes,
        ops=tuple((kind, *op, tick) for kind, op, tick in s.placed()),
        text=str(s),
        ticks=s.num_ticks,
        bubble=s.bubble(),
        formula=formula(s),
        in_flight=tuple(s.in_flight()),
        saved_bytes=saved_bytes(lowering, program.step_batch),
        sends=executor.num_sends + executor.num_gradient_sends,
    )


@dataclasses.dataclass(frozen=True)
class Explanation:
    """One training step under one layout.

    Attributes:
      layout: the layout string.
      lowering: "shard_map" or "jit".
      why_auto: what lowering="auto" or schedule=auto took, and why.
      device_kind: the device compiled for.
      mesh: {axis: size}.
      parameters: LeafPlan of every parameter.
      replicated: {path: reason} of parameters that are whole on every device.
      predicted: memory by kind, or None without stages.
      state_bytes: exact bytes per device of master weights, optimizer state and what
        synchronizes replicas.
      compiled_bytes: what the compiler reports: "arguments", "temporary" and "peak".
      traffic: collectives, declared and found.
      violations: what breaks the contract.
      warnings: what is legal and probably not meant.
      pipeline: its schedule, if there is one.
      mode: how replicas are synchronized, if they train apart; then the traffic is that
        of the step beside which most travels.
    """

    layout: str
    lowering: str
    why_auto: str
    device_kind: str
    mesh: dict[str, int]
    parameters: tuple[LeafPlan, ...]
    replicated: dict[str, str]
    predicted: Memory | None
    state_bytes: int
    compiled_bytes: dict[str, int]
    traffic: tuple[CollectiveRow, ...]
    violations: tuple[str, ...]
    warnings: tuple[str, ...]
    pipeline: Pipeline | None = None
    mode: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        plain = dataclasses.asdict(self)
        for leaf in plain["parameters"]:
            leaf["dtype"] = np.dtype(leaf["dtype"]).name
        if self.predicted is not None:
            plain["predicted"]["total"] = self.predicted.total
        for row in plain["traffic"]:
            if row["declared_bytes"] == float("inf"):
                row["declared_bytes"] = None
        return plain


def explain(program: TrainProgram) -> Explanation:
    """Compiles a program and says what it does.

    Args:
      program: from `meshpar.lower`; its devices may be a topology.
    """
    said = program.compiler_log
    plan, analysis = program.plan, program.compiled.memory_analysis()
    sizes = plan.bytes_per_device()
    used = any(size > 1 for size in program.mesh.shape.values())
    apart = isinstance(program, LocalProgram)
    contract, found = program.contract, program.collectives
    if apart:
        contract, found = busiest(program)
    replicated = {
        path: leaf.reason
        for path, leaf in plan.parameters.items()
        if used and not any(leaf.spec)
    }
    compiled_bytes = {
        "arguments": analysis.argument_size_in_bytes,
        "temporary": analysis.temp_size_in_bytes,
        "peak": peak_bytes(program),
    }
    return Explanation(
        layout=str(program.layout),
        lowering=program.lowering.name,
        why_auto=program.why_auto,
        device_kind=program.mesh.devices.flat[0].device_kind,
        mesh=dict(program.mesh.shape),
        parameters=tuple(plan.parameters.values()),
        replicated=replicated,
        predicted=predict_memory(program.lowering, program.step_batch, plan),
        state_bytes=sum(
            sizes[kind] for kind in ("parameters", "optimizer", "synchronization")
        ),
        compiled_bytes=compiled_bytes,
        traffic=_traffic(contract.terms, found),
        violations=tuple(program.violations()),
        warnings=(*collective_warnings(program), *rematerialized(said)),
        pipeline=_pipeline(program),
        mode=str(program) if apart else "",
    )


def _traffic(
    terms: tuple[DeclaredCollective, ...], found: list[Collective]
) -> tuple[CollectiveRow, ...]:
    rows: dict[tuple, dict[str, Any]] = {}

    def row(kind: str, axes: tuple[str, ...]) -> dict[str, Any]:
        empty = dict(declared=0.0, bounded=False, found=0.0, exposed=0.0, runs=0)
        return rows.setdefault((kind, axes), empty | {"why": []})

    for term in terms:
        one = row(term.kind, term.axes)
        one["declared"] += term.wire_bytes
        one["bounded"] |= term.bound
        one["why"].append(term.why)
    for collective in found:
        one = row(collective.kind, collective.axes)
        one["found"] += collective.wire_bytes
        one["runs"] += collective.executions
        if not collective.overlapped:
            one["exposed"] += collective.wire_bytes
    return tuple(
        CollectiveRow(
            kind,
            axes,
            one["declared"],
            one["bounded"],
            one["found"],
            one["exposed"],
            one["runs"],
            tuple(dict.fromkeys(one["why"])),
        )
        for (kind, axes), one in rows.items()
    )
