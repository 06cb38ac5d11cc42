"""Reads the collectives out of a compiled program: kind, mesh axes, bytes, executions.

Takes the optimized HLO text of a CPU, TPU or GPU program. Loop trip counts are
multiplied in, asynchronous pairs and the fragments of one chain (TPU) count once, and
every collective is traced back to the mesh axes of its groups and to the source line
that asked for it. A collective is overlapped if the schedule has compute between its
start and its end, and exposed otherwise.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from meshpar.contracts.collective import Collective
from meshpar.contracts.hlo_groups import axes_of
from meshpar.contracts.hlo_text import (
    Instruction,
    callees,
    parse_computations,
    source_lines,
    trip_count,
    type_bytes,
)

_KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
_COMPUTE = {"fusion", "dot", "convolution", "custom-call", "while", "reduce", "scatter"}
"""Instructions that keep a device busy."""


def _payload(one: Instruction, kind: str, within: Mapping[str, Instruction]) -> int:
    """Bytes of the whole tensor that a collective moves, on one device."""
    operands = sum(type_bytes(within[o].type) for o in one.operands if o in within)
    result = type_bytes(one.type)
    if kind == "all_gather":
        # The result of a start is the pair (operand, result).
        return result - operands if one.opcode.endswith("-start") else result
    return operands or result


def _between_slices(
    one: Instruction, schedule: list[Instruction], within: Mapping[str, Instruction]
) -> tuple[str, int, int] | None:
    """(kind, place of its end, payload) of a send over the links between slices."""
    pattern = r'_xla_host_transfer_rendezvous="([^"]+)".*_transfer_type="([A-Z_]+)"'
    if one.opcode != "send" or not (found := re.search(pattern, one.line)):
        return None
    name, kind = found.groups()
    received = next(
        other
        for other in schedule
        if other.opcode == "recv" and f'rendezvous="{name}"' in other.line
    )
    end = next(
        place
        for place, other in enumerate(schedule)
        if other.opcode == "recv-done" and received.name in other.operands
    )
    first = re.match(r"\((\S+\[[\d,]*\])", received.type).group(1)
    sent = sum(type_bytes(within[o].type) for o in one.operands[:1])
    return kind.lower(), end, type_bytes(first) if kind == "ALL_GATHER" else sent


def parse_hlo(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """Lists the collectives of a compiled program.

    Args:
      text: `jax.stages.Compiled.as_text()`.
      mesh: {axis: size}, outer to inner, as in `jax.sharding.Mesh.shape`.

    Raises:
      ValueError: the text is no compiled program, or hides how often a loop runs.
    """
    computations, entry = parse_computations(text)
    sources = source_lines(text)

    def found(
        computation: str, executions: int, site: tuple, conditional: bool = False
    ) -> Iterator[_Found]:
        within = computations.get(computation, {})
        schedule = list(within.values())
        for place, one in enumerate(schedule):
            if one.opcode == "while":
                body = re.search(r"body=%?([\w.\-]+)", one.line).group(1)
                trips = executions * trip_count(one, computations)
                yield from found(body, trips, (body, None), conditional)
                continue
            # A fusion runs where it is called: fragments are ordered by that place.
            here = site if site[1] is not None else (computation, place)
            base = one.opcode.removesuffix("-start")
            if base in _KINDS:
                kind = _KINDS[base]
                if kind == "all_reduce" and computation.startswith(
                    "all-reduce-scatter"
                ):
                    kind = "reduce_scatter"  # How TPU programs may spell it.
                axes, size = axes_of(one.line, mesh)
                frame = re.search(r"stack_frame_id=(\d+)", one.line)
                chain = re.search(r'chain_id="(\d+)"', one.line)
                end = place
                if one.opcode.endswith("-start"):
                    end = _end(schedule, place)
                collective = Collective(
                    kind=kind,
                    axes=axes,
                    group_size=size,
                    payload_bytes=_payload(one, kind, within),
                    executions=executions,
                    asynchronous=end > place,
                    overlapped=_computes(schedule, place, end),
                    computation=computation,
                    source=sources.get(frame.group(1), "") if frame else "",
                    conditional=conditional,
                )
                yield chain and (chain.group(1), kind), here, collective
            elif between := _between_slices(one, schedule, within):
                kind, end, payload = between
                axes, size = axes_of(one.line, mesh)
                overlapped = _computes(schedule, place, end)
                collective = Collective(
                    kind=kind,
                    axes=axes,
                    group_size=size,
                    payload_bytes=payload,
                    executions=executions,
                    asynchronous=True,
                    overlapped=overlapped,
                    computation=computation,
                    source="",
                    conditional=conditional,
                )
                yield None, here, collective
            elif not one.opcode.endswith(("-done", "-update")):
                called = one.opcode in ("fusion", "custom-call")
                under = conditional or one.opcode == "conditional"
                for callee in callees(one):
                    where = here if called else (callee, None)
                    yield from found(callee, executions, where, under)

    return _merged(found(entry, 1, (entry, None)), computations)


_Found = tuple[Any, tuple[str, int], Collective]
"""A collective with the chain that it is a fragment of, and where it runs."""


def _end(schedule: list[Instruction], start: int) -> int:
    """Place of the last instruction of an asynchronous chain that begins at `start`."""
    names, end = {schedule[start].name}, start
    for place, one in enumerate(schedule[start + 1 :], start + 1):
        if one.opcode.endswith(("-done", "-update")) and names & set(one.operands):
            names.add(one.name)
            end = place
    return end


def _computes(schedule: list[Instruction], start: int, end: int) -> bool:
    return any(one.opcode in _COMPUTE for one in schedule[start + 1 : end])


def _merged(
    found: Iterable[_Found], computations: Mapping[str, Mapping[str, Instruction]]
) -> list[Collective]:
    """Collectives that move something; all fragments of a chain as one."""
    chains: dict[Any, list[_Found]] = {}
    for number, one in enumerate(found):
        if one[2].group_size > 1:
            chains.setdefault(one[0] or number, []).append(one)
    merged = []
    for fragments in chains.values():
        first = fragments[0][2]
        if len(fragments) > 1:
            computation = fragments[0][1][0]
            places = [place for _, (_, place), _ in fragments]
            schedule = list(computations[computation].values())
            overlapped = _computes(schedule, min(places), max(places))
            first = dataclasses.replace(first, asynchronous=True, overlapped=overlapped)
        merged.append(first)
    return merged
