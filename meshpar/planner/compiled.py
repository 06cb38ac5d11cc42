"""Compiles candidate layouts of a model without layers, and reads their programs.

No formula knows what such a model holds and moves under a layout, as the compiler
inserts its collectives. Its few layouts are compiled instead, for the machine of the
plan. Memory and bytes are those of the programs, the same that `explain` reads.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from meshpar.compose import combination, lower
from meshpar.contracts.collective import Collective
from meshpar.errors import LayoutError, MeshparError, shown
from meshpar.layouts.layout import Layout
from meshpar.layouts.plan import Plan
from meshpar.layouts.refusals.of_training import OF_TRAINING
from meshpar.layouts.refusals.reasons import first_reason
from meshpar.layouts.resolve import make_plan
from meshpar.layouts.wanted import Wanted
from meshpar.lowering.memory import Memory
from meshpar.lowering.optimizer import optimizer_of
from meshpar.lowering.train_program import TrainProgram
from meshpar.mesh.machine import Machine
from meshpar.models.model import Model
from meshpar.planner.candidate import Candidate
from meshpar.planner.facts import used_names
from meshpar.planner.seconds import Terms
from meshpar.planner.space import layouts
from meshpar.planner.transfers import link
from meshpar.replicated import num_rows, row_leaves

MOST_COMPILED = 48
"""Most layouts that are compiled for one plan: those with the least of `tensor` first,
whose activations move least."""

_NOT_COMPILED = (
    f"not compiled, as {MOST_COMPILED} others use less of tensor: ask for parts of the "
    "layout by require or forbid"
)

_NO_ROOM_FOR_STATE = "parameters and optimizer state alone do not fit into a device"


@dataclasses.dataclass(frozen=True)
class ProgramSeconds(Terms):
    """Time of a compiled step, by term.

    Attributes:
      compute: operators: the cycles that the compiler states; elsewhere their FLOPs at
        the rate of matmuls.
      memory: what operators read and write, where the compiler states no cycles.
      fresh: memory for temporary arrays, where a computer gives it page by page.
      transfers: those of collectives, as far as no compute hides them.
      wire_bytes: bytes that one device sends in all.
    """

    compute: float
    memory: float
    fresh: float
    transfers: float
    wire_bytes: float


class Compiled(NamedTuple):
    """The compiled candidates of a plan, and the layouts that have none.

    Attributes:
      candidates: those that were compiled.
      errors: why others were not.
      nearest: the layout with the smallest state, if it has no program, and why.
    """

    candidates: list[Candidate]
    errors: list[LayoutError]
    nearest: str


def compiled_candidates(
    model: Model,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    batch: Any,
    compute_dtype: Any,
    machine: Machine,
    wanted: Wanted,
) -> Compiled:
    """Compiles the layouts of a model without layers, and reads them.

    Args:
      model: without layers.
      optimizer: as in `meshpar.lower`.
      batch: abstract batch [batch, ...].
      compute_dtype: as in `meshpar.lower`.
      machine: to plan for.
      wanted: what layouts must have, and must not use.
    """
    errors: list[LayoutError] = []
    sizes: dict[Layout, int] = {}  # Of the state of each layout.
    optimizer_state = optimizer_of(model, optimizer).abstract_state
    for layout in _space(model, batch, machine, wanted):
        try:
            plan = _plan(layout, model, optimizer_state, batch, compute_dtype)
        except LayoutError as error:
            errors.append(error)
        else:
            sizes[layout] = _state_bytes(plan)
    fit = [layout for layout, size in sizes.items() if size <= machine.memory_bytes]
    errors += [LayoutError(_NO_ROOM_FOR_STATE)] * (len(sizes) - len(fit))
    # The sort is stable: meshes in the order of the space, smallest `tensor` first.
    fit.sort(key=lambda layout: layout.tensor)
    errors += [LayoutError(_NOT_COMPILED)] * len(fit[MOST_COMPILED:])
    options = dict(devices=machine.devices, compute_dtype=compute_dtype)
    candidates, failed = [], {}
    for layout in fit[:MOST_COMPILED]:
        try:
            program = lower(model, optimizer, layout, batch, **options)
        except LayoutError as error:
            errors.append(error)
            continue
        try:
            candidates.append(read_candidate(program, machine))
        except (MeshparError, jax.errors.JaxRuntimeError) as error:
            errors.append(_failed(error))
            failed[layout] = _first_line(error)
    return Compiled(candidates, errors, _nearest(sizes, failed, machine))


def _nearest(
    sizes: Mapping[Layout, int], failed: Mapping[Layout, str], machine: Machine
) -> str:
    """Names the layout with the smallest state and why it failed; "" if there is none.

    Args:
      sizes: bytes of the state of each layout on one device.
      failed: errors of those that were compiled without success.
      machine: to plan for.
    """
    smallest = min(failed or sizes, key=sizes.get, default=None)
    if smallest in failed:
        return f"{smallest}: {failed[smallest]}"
    if smallest is None or sizes[smallest] <= machine.memory_bytes:
        return ""
    return (
        f"the smallest, {smallest}, needs {sizes[smallest] / 1e9:.1f} GB of "
        f"{machine.memory_bytes / 1e9:.1f} GB a device for its state alone; use more "
        "devices"
    )


def _space(
    model: Model, batch: Any, machine: Machine, wanted: Wanted
) -> Iterator[Layout]:
    """Lists the layouts to compile."""
    shapes = [leaf.shape for leaf in row_leaves(batch)]
    length = max((shape[1] for shape in shapes if len(shape) > 1), default=1)
    return layouts(
        len(machine.devices),
        model,
        shapes[0][0],
        length,
        wanted,
        lambda: used_names(model, batch, machine.devices[0]),
    )


def _plan(
    layout: Layout, model: Model, optimizer_state: Any, batch: Any, compute_dtype: Any
) -> Plan:
    """The plan of a layout, with all that is refused before anything is compiled.

    Raises:
      LayoutError: model or batch cannot honour it.
    """
    if reason := first_reason(combination(model, layout), OF_TRAINING):
        raise LayoutError(reason)
    layout.check_batch_size(num_rows(batch))
    return make_plan(layout, model.params, optimizer_state, compute_dtype)


def _state_bytes(plan: Plan) -> int:
    """Bytes of parameters and optimizer state on one device."""
    sizes = plan.bytes_per_device()
    return sizes["parameters"] + sizes["optimizer"]


def _first_line(error: Exception) -> str:
    return shown(str(error).strip().partition("\n")[0], 300)


def _failed(error: Exception) -> LayoutError:
    """A LayoutError that says why a compiler gave no program."""
    if "RESOURCE_EXHAUSTED" in (line := _first_line(error)):
        return LayoutError("the compiler finds no room for the step in a device")
    return LayoutError(f"no program: {line}")


def read_candidate(program: TrainProgram, machine: Machine) -> Candidate:
    """Compiles a program, and reads its memory, time and traffic.

    Args:
      program: of a step, for the devices of the machine.
      machine: whose rates turn FLOPs and bytes into seconds.
    """
    inspection, sizes = program.inspection, program.plan.bytes_per_device()
    # Compilers do not tell apart what else is in memory at the peak.
    memory = Memory(
        parameters=sizes["parameters"],
        optimizer=sizes["optimizer"],
        weights=0,
        gradients=0,
        activations=0,
        working=inspection.peak_bytes - _state_bytes(program.plan),
    )
    seconds = _seconds(program, machine).slower(machine.slowdown)
    return Candidate(program.layout, memory, seconds, seconds.wire_bytes, None)


def _seconds(program: TrainProgram, machine: Machine) -> ProgramSeconds:
    """The time of a compiled step."""
    inspection, memory, fresh = program.inspection, 0.0, 0.0
    time = inspection.time
    if time is not None:
        compute = time.compute_seconds
    else:
        work = inspection.work
        compute = work.flops / machine.flops
        memory = work.moved / machine.chip.memory_bandwidth
        temporary = inspection.compiled.memory_analysis().temp_size_in_bytes
        fresh = temporary / machine.fresh_bandwidth
    if time is not None and machine.num_slices == 1:
        # The compiler's estimate leaves the latency of messages out.
        alone = [c for c in inspection.collectives if not c.overlapped]
        transfers = time.exposed_seconds + sum(
            c.seconds(machine.link()._replace(bandwidth=math.inf)) for c in alone
        )
    else:
        transfers = _exposed(program, machine, compute + memory)
    sent = sum(collective.wire_bytes for collective in inspection.collectives)
    return ProgramSeconds(compute, memory, fresh, transfers, sent)


def _exposed(program: TrainProgram, machine: Machine, beside: float) -> float:
    """Seconds of collectives that no compute hides."""

    def seconds(collectives: Sequence[Collective]) -> float:
        return sum(
            c.seconds(link(program.lowering, machine, c.axes)) for c in collectives
        )

    found = program.inspection.collectives
    hidden = seconds([c for c in found if c.overlapped])
    return seconds([c for c in found if not c.overlapped]) + max(0.0, hidden - beside)
