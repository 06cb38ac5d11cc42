"""Reads the collectives out of a compiled program: kind, mesh axes, bytes, executions.

Takes the optimized HLO text of a CPU, TPU or GPU program. Loop trip counts are
multiplied in, asynchronous pairs and the fragments of one chain (TPU) count once, and
every collective is traced back to the mesh axes of its groups and to the source line
that asked for it. A collective is overlapped if the schedule has compute between its
start and its end, and exposed otherwise.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from meshpar import cost
from meshpar.device_groups import axes_of

_DTYPE_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "s4", "u4", "f8e4m3fn", "f8e5m2"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
    "c128": 16,
}
_KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
_CALLS = re.compile(
    r"\b(?:calls|to_apply|branch_computations|true_computation|false_computation"
    r"|called_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)\}?"
)
_COMPUTE = {"fusion", "dot", "convolution", "custom-call", "while", "reduce", "scatter"}
"""Instructions that keep a device busy."""
_OPCODE = re.compile(r"(?<![\w:.%\-])([a-z][\w\-]*)\(")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program.

    Attributes:
      kind: all_reduce, all_gather, reduce_scatter, all_to_all, permute or broadcast.
      axes: mesh axes over which it runs, outer to inner; () where no set of axes gives
        its groups.
      group_size: devices that take part together.
      payload_bytes: bytes of the whole tensor on one device: the operand, or the result
        of an all_gather.
      executions: how often it runs per call of the program.
      asynchronous: whether it starts and ends in different places.
      overlapped: whether compute is scheduled between its start and its end.
      computation: the computation in which it stands.
      source: "file:line" that asked for it; "" where the compiler made it up.
      conditional: whether it stands under a conditional.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    payload_bytes: int
    executions: int
    asynchronous: bool
    overlapped: bool
    computation: str
    source: str
    conditional: bool = False

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends per call of the program, all executions."""
        one = cost.wire_bytes(self.kind, self.payload_bytes, self.group_size)
        return one * self.executions


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    line: str


def _type_bytes(text: str) -> int:
    """Bytes of all arrays in an HLO type, tuples included."""
    return sum(
        _DTYPE_BYTES[dtype] * math.prod(int(d) for d in dims.split(",") if d)
        for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", text)
        if dtype in _DTYPE_BYTES
    )


def _parse_instruction(line: str) -> _Instruction | None:
    match = re.match(r"(?:ROOT )?%?([\w.\-]+) = (.*)", line)
    if not match:
        return None
    right = re.sub(r"/\*.*?\*/", "", match.group(2))
    if not (opcode := _OPCODE.search(right)):
        return None
    operands = right[opcode.end() :].split(")", 1)[0]
    return _Instruction(
        name=match.group(1),
        type=right[: opcode.start()],
        opcode=opcode.group(1),
        operands=tuple(re.findall(r"%([\w.\-]+)", operands)),
        line=line,
    )


def _parse(text: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    """Computations {name: {instruction name: instruction}} and the entry's name."""
    computations: dict[str, dict[str, _Instruction]] = {}
    current, entry = None, ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{", line):
            current = computations.setdefault(header.group(2), {})
            entry = header.group(2) if header.group(1) else entry
        elif current is not None and (one := _parse_instruction(line.strip())):
            current[one.name] = one
    if not entry:
        raise ValueError("no ENTRY computation: give the text of a compiled program")
    return computations, entry


def _sources(text: str) -> dict[str, str]:
    """{stack frame id: "file:line"} from the tables at the head of the text."""

    def table(name: str, pattern: str) -> dict[str, tuple[str, ...]]:
        match = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
        rows = match.group(1).splitlines() if match else []
        found = {row.split(" ", 1)[0]: re.search(pattern, row) for row in rows}
        return {number: m.groups() for number, m in found.items() if m}

    files = table("FileNames", r'"(.*)"')
    places = table("FileLocations", r"file_name_id=(\d+) .*?\bline=(\d+)")
    frames = table("StackFrames", r"file_location_id=(\d+)")
    return {
        frame: f"{files[places[place][0]][0]}:{places[place][1]}"
        for frame, (place,) in frames.items()
        if place in places and places[place][0] in files
    }


def _trip_count(
    loop: _Instruction, computations: Mapping[str, Mapping[str, _Instruction]]
) -> int:
    """Trips of a while loop: as the compiler notes it, or the bound it compares with.

    Raises:
      ValueError: neither tells.
    """
    if known := re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.line):
        return int(known.group(1))
    condition = re.search(r"condition=%?([\w.\-]+)", loop.line).group(1)
    reachable, bounds = [condition], []
    for name in reachable:
        for one in computations.get(name, {}).values():
            if one.opcode == "constant":
                bounds += re.findall(r"[su]32\[\]\S* constant\((\d+)\)", one.line)
            reachable += [c for c in _callees(one) if c not in reachable]
    if not bounds:
        raise ValueError(f"cannot tell how often the loop runs: {loop.line[:200]}")
    return max(map(int, bounds))


def _callees(one: _Instruction) -> list[str]:
    found = _CALLS.findall(one.line)
    return [name.strip(" %") for part in found for name in part.split(",")]


def _payload(one: _Instruction, kind: str, within: Mapping[str, _Instruction]) -> int:
    """Bytes of the whole tensor that a collective moves, on one device."""
    operands = sum(_type_bytes(within[o].type) for o in one.operands if o in within)
    result = _type_bytes(one.type)
    if kind == "all_gather":
        # The result of a start is the pair (operand, result).
        return result - operands if one.opcode.endswith("-start") else result
    return operands or result


def _between_slices(
    one: _Instruction, schedule: list[_Instruction], within: Mapping[str, _Instruction]
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
    sent = sum(_type_bytes(within[o].type) for o in one.operands[:1])
    return kind.lower(), end, _type_bytes(first) if kind == "ALL_GATHER" else sent


def read(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """Lists the collectives of a compiled program.

    Args:
      text: `jax.stages.Compiled.as_text()`.
      mesh: {axis: size}, outer to inner, as in `jax.sharding.Mesh.shape`.

    Raises:
      ValueError: the text is no compiled program, or hides how often a loop runs.
    """
    computations, entry = _parse(text)
    sources = _sources(text)

    def found(
        computation: str, executions: int, site: tuple, conditional: bool = False
    ) -> Iterator[_Found]:
        within = computations.get(computation, {})
        schedule = list(within.values())
        for place, one in enumerate(schedule):
            if one.opcode == "while":
                body = re.search(r"body=%?([\w.\-]+)", one.line).group(1)
                trips = executions * _trip_count(one, computations)
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
                for callee in _callees(one):
                    where = here if called else (callee, None)
                    yield from found(callee, executions, where, under)

    return _merged(found(entry, 1, (entry, None)), computations)


_Found = tuple[Any, tuple[str, int], Collective]
"""A collective with the chain that it is a fragment of, and where it runs."""


def _end(schedule: list[_Instruction], start: int) -> int:
    """Place of the last instruction of an asynchronous chain that begins at `start`."""
    names, end = {schedule[start].name}, start
    for place, one in enumerate(schedule[start + 1 :], start + 1):
        if one.opcode.endswith(("-done", "-update")) and names & set(one.operands):
            names.add(one.name)
            end = place
    return end


def _computes(schedule: list[_Instruction], start: int, end: int) -> bool:
    return any(one.opcode in _COMPUTE for one in schedule[start + 1 : end])


def _merged(
    found: Iterable[_Found], computations: Mapping[str, Mapping[str, _Instruction]]
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
