"""What a layout does to a model: specs, bytes, collectives, warnings, as data.

Everything comes from the plan, the contract and the compiled program; no accelerator is
needed, only its compiler (`mesh.topology`).
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from meshpar import choose, compiler_log, local_contract, memory, schedules
from meshpar.compiled import Collective
from meshpar.contract import Term
from meshpar.local_program import LocalProgram
from meshpar.memory import Memory
from meshpar.pipelined import Pipelined
from meshpar.plan import LeafPlan
from meshpar.program import TrainProgram

SMALL_BYTES, MANY = 2**16, 64
"""Collectives below this, run more often than that, are better combined."""


@dataclasses.dataclass(frozen=True)
class Traffic:
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
      stash_bytes: bytes on one device that are kept between F and B.
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
    stash_bytes: int
    sends: int


def _pipeline(program: TrainProgram) -> Pipeline | None:
    lowering = program.lowering
    if not isinstance(lowering, Pipelined):
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
        formula=schedules.formula(s),
        in_flight=tuple(s.in_flight()),
        stash_bytes=memory.stash_bytes(lowering, program.step_batch),
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
    traffic: tuple[Traffic, ...]
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
        contract, found = local_contract.busiest(program)
    replicated = {
        path: leaf.reason
        for path, leaf in plan.parameters.items()
        if used and not any(leaf.spec)
    }
    compiled_bytes = {
        "arguments": analysis.argument_size_in_bytes,
        "temporary": analysis.temp_size_in_bytes,
        "peak": choose.peak_bytes(program),
    }
    return Explanation(
        layout=str(program.layout),
        lowering=program.lowering.name,
        why_auto=program.why_auto,
        device_kind=program.mesh.devices.flat[0].device_kind,
        mesh=dict(program.mesh.shape),
        parameters=tuple(plan.parameters.values()),
        replicated=replicated,
        predicted=memory.predict(program.lowering, program.step_batch, plan),
        state_bytes=sum(
            sizes[kind] for kind in ("parameters", "optimizer", "synchronization")
        ),
        compiled_bytes=compiled_bytes,
        traffic=_traffic(contract.terms, found),
        violations=tuple(program.violations()),
        warnings=(*_moved_oddly(program), *compiler_log.rematerialized(said)),
        pipeline=_pipeline(program),
        mode=str(program) if apart else "",
    )


def _traffic(terms: tuple[Term, ...], found: list[Collective]) -> tuple[Traffic, ...]:
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
        Traffic(
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


def _moved_oddly(program: TrainProgram) -> Iterator[str]:
    """Warnings about collectives that are too small, or too large."""
    small: dict[tuple, list[Collective]] = {}
    stacked = _stacked_sizes(program)
    for one in program.collectives:
        if one.payload_bytes < SMALL_BYTES:
            small.setdefault((one.kind, one.axes), []).append(one)
        gathered = one.kind == "all_gather" and "fsdp" in one.axes
        if gathered and one.payload_bytes in stacked:
            yield (
                f"gather of a whole stack of weights, {stacked[one.payload_bytes]}: "
                f"{one.payload_bytes} bytes ({one.source or 'made by the compiler'})"
            )
    for (kind, axes), group in small.items():
        runs = sum(one.executions for one in group)
        if runs > MANY:
            places = sorted({one.source for one in group if one.source})
            yield (
                f"uncombined: {runs} x {kind} over {'*'.join(axes)} of less than "
                f"{SMALL_BYTES} bytes ({', '.join(places[:3])})"
            )


def _stacked_sizes(program: TrainProgram) -> dict[int, str]:
    """{whole bytes on one device: path} of stacks that zero=3 gathers by layer."""
    plan, staged = program.plan, program.model.staged
    if staged is None or staged.depth == 1 or plan.layout.zero < 3:
        return {}
    sizes = {}
    for path, leaf in staged.split({**plan.parameters, **plan.weights})[1].items():
        for one in (plan.parameters[path], leaf):
            ways = math.prod(plan.layout.sizes[a] for s in one.spec for a in s)
            sizes[one.bytes_per_device * ways // plan.layout.tensor] = path
    return sizes
