"""Parses the text of a compiled HLO program into computations and instructions."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping

_DTYPE_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "s4", "u4", "s2", "u2", "f4e2m1fn"), 1),
    **dict.fromkeys(("f8e3m4", "f8e4m3", "f8e5m2", "f8e4m3fn", "f8e8m0fnu"), 1),
    **dict.fromkeys(("f8e4m3b11fnuz", "f8e4m3fnuz", "f8e5m2fnuz"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
    "c128": 16,
}
_CALLS = tuple(
    f", {word}="
    for word in "calls to_apply branch_computations true_computation "
    "false_computation called_computations".split()
)
_CALLED = re.compile(r"\{([^}]*)\}|(%?[\w.\-]+)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_COMMENT = re.compile(r"/\*.*?\*/")
_OPCODE = re.compile(r"(?<![\w:.%\-])([a-z][\w\-]*)\(")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without the leading "%".
      type: of the result, as text such as "f32[4,8]{1,0}".
      opcode: such as "all-gather-start".
      operands: names of the operands.
      line: the whole line.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    line: str

    @functools.cached_property
    def callees(self) -> tuple[str, ...]:
        """Names of the computations that it calls."""
        found: list[str] = []
        for word in _CALLS:
            if (at := self.line.find(word)) >= 0:
                several, one = _CALLED.match(self.line, at + len(word)).groups()
                found += (several or one or "").split(",")
        return tuple(name.strip(" %") for name in found if name)


@functools.lru_cache(maxsize=2**16)  # Programs repeat their types.
def type_bytes(text: str) -> int:
    """Bytes of all arrays in an HLO type, tuples included."""
    return sum(
        _DTYPE_BYTES[dtype] * math.prod(int(d) for d in dims.split(",") if d)
        for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", text)
        if dtype in _DTYPE_BYTES
    )


def _parse_instruction(line: str) -> Instruction | None:
    left, equals, right = line.partition(" = ")
    name = left.removeprefix("ROOT ").removeprefix("%")
    if not equals or " " in name:
        return None
    if "/*" in right:
        right = _COMMENT.sub("", right)
    # Only the types of tuples have spaces: after any other one the opcode begins.
    start = right.find(" ") + 1
    end = right.find("(", start)
    opcode = right[start:end]
    if right.startswith("(") or not opcode.replace("-", "").isalnum():
        if not (found := _OPCODE.search(right)):
            return None
        opcode, start, end = found.group(1), found.start(), found.end() - 1
    close = right.find(")", end)
    operands = right[end + 1 : close if close >= 0 else None]
    return Instruction(
        name=name,
        type=right[:start],
        opcode=opcode,
        operands=tuple(_OPERAND.findall(operands)),
        line=line,
    )


def parse_computations(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """Parses the text of a compiled program.

    Returns:
      {name of computation: {name of instruction: instruction}}, and the name of the
      entry computation.

    Raises:
      ValueError: the text has no entry computation.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    current, entry = None, ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{", line):
            current = computations.setdefault(header.group(2), {})
            entry = header.group(2) if header.group(1) else entry
        elif current is not None:
            if instruction := _parse_instruction(line.strip()):
                current[instruction.name] = instruction
    if not entry:
        raise ValueError("no ENTRY computation: give the text of a compiled program")
    return computations, entry


def source_stacks(text: str) -> dict[str, tuple[str, ...]]:
    """{stack frame id: its "file:line"s, innermost first}, by the tables of a text."""

    def table(name: str, pattern: str) -> dict[str, tuple[str, ...]]:
        match = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
        rows = match.group(1).splitlines() if match else []
        matches = {row.split(" ", 1)[0]: re.search(pattern, row) for row in rows}
        return {number: m.groups() for number, m in matches.items() if m}

    files = table("FileNames", r'"(.*)"')
    places = table("FileLocations", r"file_name_id=(\d+) .*?\bline=(\d+)")
    frames = table("StackFrames", r"file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
    # Some texts count parents from 1, and 1 is the parent of the outermost frame.
    first = 1 if frames.get("1", ("", None))[1] == "1" else 0
    stacks: dict[str, tuple[str, ...]] = {}
    for frame, (place, parent) in frames.items():
        outer = stacks.get(str(int(parent or 0) - first), ())
        file, line = places.get(place, ("", ""))
        own = (f"{files[file][0]}:{line}",) if file in files else ()
        stacks[frame] = own + outer
    return stacks


def source_lines(text: str) -> dict[str, str]:
    """{stack frame id: its innermost "file:line"}."""
    return {frame: lines[0] for frame, lines in source_stacks(text).items() if lines}


def trip_count(
    loop: Instruction, computations: Mapping[str, Mapping[str, Instruction]]
) -> int:
    """Trip count of a while loop: annotated, or read from its condition.

    There it is the largest constant, less the number at which the loop starts: a
    compiler may run the first round before the loop.

    Raises:
      ValueError: the text has neither.
    """
    if known := re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.line):
        return int(known.group(1))
    condition = re.search(r"condition=%?([\w.\-]+)", loop.line).group(1)
    reachable, bounds = [condition], []
    for name in reachable:
        for instruction in computations.get(name, {}).values():
            if instruction.opcode == "constant":
                constant = r"[su]32\[\]\S* constant\((\d+)\)"
                bounds += re.findall(constant, instruction.line)
            reachable += [c for c in instruction.callees if c not in reachable]
    if not bounds:
        raise ValueError(f"cannot read the trip count of the loop: {loop.line[:200]}")
    return max(map(int, bounds)) - _first_number(loop, computations, condition)


def _first_number(
    loop: Instruction,
    computations: Mapping[str, Mapping[str, Instruction]],
    condition: str,
) -> int:
    """The constant at which a loop's counter starts; 0 if the text does not tell."""
    inside = computations.get(condition, {})
    outside = next((c for c in computations.values() if loop.name in c), {})
    root = next((x for x in inside.values() if x.line.startswith("ROOT")), None)
    counters = [inside.get(name) for name in root.operands] if root else []
    indices = [
        re.search(r"\bindex=(\d+)", x.line)
        for x in counters
        if x and x.opcode == "get-tuple-element"
    ]
    start = outside.get(loop.operands[0]) if loop.operands else None
    if len(indices) != 1 or start is None or start.opcode != "tuple":
        return 0
    first = outside.get(start.operands[int(indices[0].group(1))])
    while first is not None and first.opcode == "copy":
        first = outside.get(first.operands[0])
    if first is None or first.opcode != "constant":
        return 0
    return int(re.search(r"constant\((-?\d+)\)", first.line).group(1))
