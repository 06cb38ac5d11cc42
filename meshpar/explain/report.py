"""Explains a layout: specs, bytes, collectives and warnings of its program, as data.

Everything comes from the plan, the contract and the compiled program; no accelerator is
needed, only its compiler (`mesh.topology`).
"""

import dataclasses
from typing import Any

import numpy as np

from meshpar.contracts.collective import Collective
from meshpar.contracts.compiler_log import rematerialized
from meshpar.contracts.contract import Contract
from meshpar.contracts.declared import DeclaredCollective
from meshpar.contracts.host_transfers import HostTransfer, link_seconds
from meshpar.contracts.shares import Shares
from meshpar.contracts.step_time import StepTime
from meshpar.explain.warnings import collective_warnings, replicated_state
from meshpar.layouts.plan import LeafPlan, Plan
from meshpar.lowering.inspection import Inspection
from meshpar.lowering.memory import Memory
from meshpar.lowering.train_program import TrainProgram
from meshpar.mesh.chips import chip_of
from meshpar.pipeline.report import PipelineReport


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """The collectives of one kind over the same axes, declared and found.

    Attributes:
      kind: as `contracts.Collective.kind`.
      axes: mesh axes.
      declared_bytes: bytes that one device sends per step, as declared.
      bounded: whether the declared bytes are an upper bound.
      found_bytes: bytes that one device sends per step, as compiled.
      exposed_bytes: the part of `found_bytes` that no compute hides.
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
class Explanation:
    """One program under one layout: a training step, prefill or decoding.

    Attributes:
      layout: the layout string.
      lowering: "shard_map" or "jit".
      why_auto: the choice of lowering=auto or schedule=auto, and why.
      device_kind: the device that the program is compiled for.
      mesh: {axis: size}.
      parameters: LeafPlan of every parameter.
      replicated: {path: reason} of parameters that are whole on every device.
      predicted: memory by kind, or None for a model without layers.
      state_bytes: exact bytes per device of master weights, optimizer state and the
        state that synchronizes replicas.
      compiled_bytes: as the compiler reports them: "arguments", "temporary", "peak".
      traffic: collectives, declared and found.
      shares: how much of what the program moves was declared exactly.
      host: declared transfers between one device and host memory.
      host_found: those of the compiled step; None where programs do not show them.
      host_seconds: least time of the declared ones over the link, both ways at once;
        None for an unknown chip.
      time: of one run, estimated from the compiler's schedule; None where the compiler
        states no cycles.
      violations: lines that say where the program breaks its contract.
      warnings: lines about things that are legal and probably not meant.
      pipeline: its schedule, if there is one.
      mode: how replicas are synchronized, if they train apart; `traffic` then describes
        the step that moves most. What a program that does not train runs.
      name: of a program that does not train; "" for a training step.
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
    shares: Shares
    violations: tuple[str, ...]
    warnings: tuple[str, ...]
    pipeline: PipelineReport | None = None
    mode: str = ""
    name: str = ""
    host: tuple[HostTransfer, ...] = ()
    host_found: HostTransfer | None = None
    host_seconds: float | None = None
    time: StepTime | None = None

    def as_dict(self) -> dict[str, Any]:
        """The explanation as plain values, for JSON."""
        plain = dataclasses.asdict(self)
        for leaf in plain["parameters"]:
            leaf["dtype"] = np.dtype(leaf["dtype"]).name
        if self.predicted is not None:
            plain["predicted"]["total"] = self.predicted.total
        if self.time is not None:
            plain["time"]["seconds"] = self.time.seconds
        for row in plain["traffic"]:
            if row["declared_bytes"] == float("inf"):
                row["declared_bytes"] = None
        return plain


def explain(program: TrainProgram) -> Explanation:
    """Compiles a program and explains it.

    Args:
      program: from `meshpar.lower`; its devices may be a topology.
    """
    lowering, inspection, plan = program.lowering, program.inspection, program.plan
    # The log is captured while the program is compiled, which all else would do.
    log, sizes = inspection.compiler_log, plan.bytes_per_device()
    return describe(
        inspection,
        plan,
        *program.busiest,
        layout=str(program.layout),
        lowering=lowering.name,
        why_auto=program.why_auto,
        predicted=lowering.memory(program.step_batch, sizes),
        state_bytes=sum(
            sizes[kind] for kind in ("parameters", "optimizer", "synchronization")
        ),
        violations=tuple(program.violations()),
        warnings=(
            *replicated_state(program),
            *collective_warnings(program),
            *rematerialized(log),
        ),
        pipeline=lowering.report(program.step_batch).get("pipeline"),
        mode=program.mode_text,
    )


def describe(
    inspection: Inspection,
    plan: Plan,
    contract: Contract,
    collectives: list[Collective],
    **own: Any,
) -> Explanation:
    """Explains a compiled program.

    Args:
      inspection: the program.
      plan: of its state.
      contract: what it declares.
      collectives: those found, which may be of another program that moves more.
      **own: the fields of `Explanation` that do not follow from these.
    """
    mesh, analysis = inspection.mesh, inspection.compiled.memory_analysis()
    device_kind, host = mesh.devices.flat[0].device_kind, contract.host
    distributed = any(size > 1 for size in mesh.shape.values())
    chip = chip_of(device_kind)
    seconds = link_seconds(host, chip.host_bandwidth) if host and chip else None
    return Explanation(
        device_kind=device_kind,
        mesh=dict(mesh.shape),
        parameters=tuple(plan.parameters.values()),
        replicated={
            path: _reason_whole(leaf)
            for path, leaf in plan.parameters.items()
            if distributed and not any(leaf.spec)
        },
        compiled_bytes={
            "arguments": analysis.argument_size_in_bytes,
            "temporary": analysis.temp_size_in_bytes,
            "peak": inspection.peak_bytes,
        },
        traffic=_collective_rows(contract.terms, collectives),
        shares=Shares.of(contract, collectives),
        host=host,
        host_found=inspection.host_transfers if host else None,
        host_seconds=seconds,
        time=inspection.time,
        **own,
    )


def _reason_whole(leaf: LeafPlan) -> str:
    """A reason why a variable is whole on every device."""
    own = "" if leaf.kind == "parameter" else f"{leaf.kind}: "
    return own + leaf.reason


def _collective_rows(
    declared: tuple[DeclaredCollective, ...], collectives: list[Collective]
) -> tuple[CollectiveRow, ...]:
    """One row per kind and axes, declared ones first."""
    keys = [(term.kind, term.axes) for term in declared]
    keys += [(collective.kind, collective.axes) for collective in collectives]
    rows = []
    for kind, axes in dict.fromkeys(keys):
        terms = [d for d in declared if (d.kind, d.axes) == (kind, axes)]
        compiled = [c for c in collectives if (c.kind, c.axes) == (kind, axes)]
        rows.append(
            CollectiveRow(
                kind=kind,
                axes=axes,
                declared_bytes=sum((term.wire_bytes for term in terms), 0.0),
                bounded=any(term.bound for term in terms),
                found_bytes=sum((c.wire_bytes for c in compiled), 0.0),
                exposed_bytes=sum(
                    (c.wire_bytes for c in compiled if not c.overlapped), 0.0
                ),
                executions=sum(c.executions for c in compiled),
                why=tuple(dict.fromkeys(term.why for term in terms)),
            )
        )
    return tuple(rows)
