"""Parses the text of a compiled HLO program into computations and instructions."""

import dataclasses
import math
import re
from collections.abc import Mapping

_DTYPE_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "s4", "u4", "f8e4m3fn", "f8e5m2"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
    "c128": 16,
}
_CALLS = re.compile(
    r"\b(?:calls|to_apply|branch_computations|true_computation|false_computation"
    r"|called_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)\}?"
)
_OPCODE = re.compile(r"(?<![\w:.%\-])([a-z][\w\-]*)\(")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    line: str


def type_bytes(text: str) -> int:
    """Bytes of all arrays in an HLO type, tuples included."""
    return sum(
        _DTYPE_BYTES[dtype] * math.prod(int(d) for d in dims.split(",") if d)
        for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", text)
        if dtype in _DTYPE_BYTES
    )


def _parse_instruction(line: str) -> Instruction | None:
    match = re.match(r"(?:ROOT )?%?([\w.\-]+) = (.*)", line)
    if not match:
        return None
    right = re.sub(r"/\*.*?\*/", "", match.group(2))
    if not (opcode := _OPCODE.search(right)):
        return None
    operands = right[opcode.end() :].split(")", 1)[0]
    return Instruction(
        name=match.group(1),
        type=right[: opcode.start()],
        opcode=opcode.group(1),
        operands=tuple(re.findall(r"%([\w.\-]+)", operands)),
        line=line,
    )


def parse_computations(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """Computations {name: {instruction name: instruction}} and the entry's name."""
    computations: dict[str, dict[str, Instruction]] = {}
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


def source_lines(text: str) -> dict[str, str]:
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


def trip_count(
    loop: Instruction, computations: Mapping[str, Mapping[str, Instruction]]
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
            reachable += [c for c in callees(one) if c not in reachable]
    if not bounds:
        raise ValueError(f"cannot tell how often the loop runs: {loop.line[:200]}")
    return max(map(int, bounds))


def callees(one: Instruction) -> list[str]:
    """Names of the computations that an instruction calls."""
    found = _CALLS.findall(one.line)
    return [name.strip(" %") for part in found for name in part.split(",")]
