"""Reads the collectives of a compiled program: kind, mesh axes, bytes, executions.

`parse_hlo` takes the optimized HLO text of a CPU, TPU or GPU program. Trip counts of
loops are multiplied in. The start and the end of an asynchronous collective count once,
and so do the fragments of one chain (TPU). Every collective is traced back to the mesh
axes of its groups and to the source line that asked for it. A collective is overlapped
if the schedule has compute between its start and its end, and exposed otherwise.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshpar.contracts.collective import Collective
from meshpar.contracts.hlo_groups import groups_of
from meshpar.contracts.hlo_text import (
    Instruction,
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
_PARTS = re.compile(r"\b(?:body|condition)=%?([\w.\-]+)")
_COMPUTE = {"fusion", "dot", "convolution", "custom-call", "while", "reduce", "scatter"}
"""Opcodes that keep a device busy."""


def is_collective(instruction: Instruction) -> bool:
    """Whether an instruction is a collective, or starts one."""
    return instruction.opcode.removesuffix("-start") in _KINDS


def called(instruction: Instruction) -> tuple[str, ...]:
    """Names of the computations that it runs; of a loop, its body and condition."""
    is_loop = instruction.opcode == "while"
    parts = _PARTS.findall(instruction.line) if is_loop else ()
    return *instruction.callees, *parts


def fragment_of(
    instruction: Instruction, scope: Mapping[str, Instruction]
) -> Instruction | None:
    """The collective that a custom call of a TPU program begins or ends.

    Args:
      instruction: the custom call, or any other instruction.
      scope: its computation.
    """
    if 'custom_call_target="AsyncCollective' not in instruction.line:
        return None
    operands = (scope[name] for name in instruction.operands if name in scope)
    return next(filter(is_collective, operands), None)


def parse_hlo(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """Lists the collectives of a compiled program that move something.

    Args:
      text: `jax.stages.Compiled.as_text()`.
      mesh: {axis: size}, outer to inner, as in `jax.sharding.Mesh.shape`.

    Returns:
      The collectives in the order of the program.

    Raises:
      ValueError: the text is not that of a compiled program, or does not tell how often
        a loop runs or which devices take part in a collective.
    """
    return HloModule(text, mesh).collectives()


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a computation: how often it runs, and where.

    Attributes:
      computation: name of the computation.
      executions: number of times that it runs per call of the program.
      conditional: whether it is under a conditional.
      site: (computation, index) of the fusion that contains it, if one does.
    """

    computation: str
    executions: int = 1
    conditional: bool = False
    site: tuple[str, int] | None = None


@dataclasses.dataclass(frozen=True)
class Occurrence:
    """A collective in the text.

    Attributes:
      collective: the instruction.
      chain: the asynchronous collective of which it is a fragment, if of any.
      computation: name of the computation that schedules it.
      index: number of the scheduled instruction in that computation.
      end: number of the instruction that waits for it; `index` if it is the same.
    """

    collective: Collective
    chain: tuple[str, str] | None
    computation: str
    index: int
    end: int


class HloModule:
    """A compiled program: computations, source lines and the mesh that it runs on."""

    def __init__(
        self, text: str, mesh: Mapping[str, int], unknown_rounds: int | None = None
    ):
        """Reads a program.

        Args:
          text: `jax.stages.Compiled.as_text()`.
          mesh: {axis: size}, outer to inner.
          unknown_rounds: rounds of a loop that does not tell how often it runs; by
            default collectives in one are an error.
        """
        self.mesh, self.unknown_rounds = mesh, unknown_rounds
        self.computations, self.entry = parse_computations(text)
        self.sources = source_lines(text)

    def collectives(self) -> list[Collective]:
        """The collectives of the program, as `parse_hlo` lists them."""
        return [self.merged(chain) for chain in self.chains(Call(self.entry))]

    @functools.cached_property
    def moving(self) -> frozenset[str]:
        """Names of the computations with collectives, their own or by others."""
        callers: dict[str, list[str]] = {}
        found = []
        for name, own in self.computations.items():
            for x in own.values():
                for callee in called(x):
                    callers.setdefault(callee, []).append(name)
            if any(is_collective(x) or x.opcode == "send" for x in own.values()):
                found.append(name)
        moving = set(found)
        for name in found:  # Grows while it is read.
            new = [x for x in callers.get(name, ()) if x not in moving]
            moving.update(new)
            found += new
        return frozenset(moving)

    def occurrences(self, call: Call) -> Iterator[Occurrence]:
        """The collectives of a computation and its callees, in order."""
        scope = self.computations.get(call.computation, {})
        schedule = list(scope.values())
        for index, instruction in enumerate(schedule):
            site = call.site or (call.computation, index)
            opcode = instruction.opcode
            if opcode == "while":
                yield from self._in_loop(call, instruction)
            elif opcode == "async-start":
                end = _end_of_pair(schedule, index)
                overlapped = _has_compute(schedule, index, end)
                for callee in self._callees(call, instruction, site):
                    for found in self.occurrences(callee):
                        moved = dataclasses.replace(
                            found.collective, asynchronous=True, overlapped=overlapped
                        )
                        last = site[1] + end - index
                        yield dataclasses.replace(found, collective=moved, end=last)
            elif is_collective(instruction):
                end = _end_of_pair(schedule, index)
                collective = self._collective(call, schedule, index, end)
                chain = re.search(r'chain_id="(\d+)"', instruction.line)
                key = (chain.group(1), collective.kind) if chain else None
                yield Occurrence(collective, key, *site, site[1] + end - index)
            elif transfer := _slice_transfer(instruction, schedule, scope):
                collective = self._between_slices(call, schedule, index, *transfer)
                yield Occurrence(collective, None, *site, transfer[1])
            elif not opcode.endswith(("-done", "-update")):
                for callee in self._callees(call, instruction, site):
                    if callee.computation in self.moving:
                        yield from self.occurrences(callee)

    def _in_loop(self, call: Call, loop: Instruction) -> list[Occurrence]:
        """The collectives of a loop.

        Raises:
          ValueError: there are some, and the data say how often it runs.
        """
        body = re.search(r"body=%?([\w.\-]+)", loop.line).group(1)
        once = Call(body, call.executions, call.conditional)
        if not (found := list(self.occurrences(once))):
            return found
        times = call.executions * self.rounds(loop)
        return list(self.occurrences(dataclasses.replace(once, executions=times)))

    def rounds(self, loop: Instruction) -> int:
        """The number of times that a loop runs.

        Raises:
          ValueError: the data say it, and nothing is given for such loops.
        """
        try:
            return trip_count(loop, self.computations)
        except ValueError:
            if self.unknown_rounds is None:
                raise
            return self.unknown_rounds

    def _callees(
        self, call: Call, instruction: Instruction, site: tuple[str, int]
    ) -> Iterator[Call]:
        # The instructions of a fusion are scheduled where the fusion is.
        fused = instruction.opcode in ("fusion", "custom-call", "async-start")
        conditional = call.conditional or instruction.opcode == "conditional"
        for callee in instruction.callees:
            yield Call(callee, call.executions, conditional, site if fused else None)

    def _collective(
        self, call: Call, schedule: Sequence[Instruction], index: int, end: int
    ) -> Collective:
        """The collective instruction at `index`, whose pair ends at `end`."""
        instruction = schedule[index]
        kind = _KINDS[instruction.opcode.removesuffix("-start")]
        if kind == "all_reduce" and call.computation.startswith("all-reduce-scatter"):
            kind = "reduce_scatter"  # TPU programs may write it as this fusion.
        groups = groups_of(instruction.line, self.mesh)
        frame = re.search(r"stack_frame_id=(\d+)", instruction.line)
        return Collective(
            kind=kind,
            axes=groups.axes,
            group_size=groups.size,
            payload_bytes=_payload(
                instruction, kind, self.computations[call.computation]
            ),
            executions=call.executions,
            asynchronous=end > index,
            overlapped=_has_compute(schedule, index, end),
            computation=call.computation,
            source=self.sources.get(frame.group(1), "") if frame else "",
            conditional=call.conditional,
            partial=groups.partial,
            name=instruction.name,
        )

    def _between_slices(
        self,
        call: Call,
        schedule: Sequence[Instruction],
        index: int,
        kind: str,
        end: int,
        payload_bytes: int,
    ) -> Collective:
        """The collective over the links between slices whose send is at `index`."""
        groups = groups_of(schedule[index].line, self.mesh)
        return Collective(
            kind=kind,
            axes=groups.axes,
            group_size=groups.size,
            payload_bytes=payload_bytes,
            executions=call.executions,
            asynchronous=True,
            overlapped=_has_compute(schedule, index, end),
            computation=call.computation,
            source="",
            conditional=call.conditional,
            partial=groups.partial,
            between_slices=True,
            name=schedule[index].name,
        )

    def chains(self, call: Call) -> list[list[Occurrence]]:
        """The collectives that move something, each with all its fragments."""
        chains: dict[Any, list[Occurrence]] = {}
        for number, occurrence in enumerate(self.occurrences(call)):
            if occurrence.collective.group_size > 1:
                chains.setdefault(occurrence.chain or number, []).append(occurrence)
        return list(chains.values())

    def merged(self, fragments: Sequence[Occurrence]) -> Collective:
        """Merges the fragments of one collective."""
        first = fragments[0]
        if len(fragments) == 1:
            return first.collective
        indices = [fragment.index for fragment in fragments]
        schedule = list(self.computations[first.computation].values())
        return dataclasses.replace(
            first.collective,
            asynchronous=True,
            overlapped=_has_compute(schedule, min(indices), max(indices)),
        )


def _payload(
    collective: Instruction, kind: str, scope: Mapping[str, Instruction]
) -> int:
    """Bytes of the whole tensor that a collective moves, on one device."""
    operands = sum(
        type_bytes(scope[name].type) for name in collective.operands if name in scope
    )
    result = type_bytes(collective.type)
    starts = collective.opcode.endswith("-start")
    if kind == "all_gather":
        # The result of a start is the pair (operand, result).
        return result - operands if starts else result
    if kind == "all_reduce":
        # The start on a GPU is such a pair, too: ((operands), results). On TPUs it has
        # the type of the result, which may be wider than the operands.
        is_pair = starts and collective.type.startswith("((")
        return result - operands if is_pair else result
    return operands or result


def _slice_transfer(
    instruction: Instruction,
    schedule: Sequence[Instruction],
    scope: Mapping[str, Instruction],
) -> tuple[str, int, int] | None:
    """(kind, index of its end, payload) of a send over the links between slices."""
    pattern = r'_xla_host_transfer_rendezvous="([^"]+)".*_transfer_type="([A-Z_]+)"'
    if instruction.opcode != "send":
        return None
    if not (match := re.search(pattern, instruction.line)):
        return None
    name, kind = match.groups()
    receive = next(
        other
        for other in schedule
        if other.opcode == "recv" and f'rendezvous="{name}"' in other.line
    )
    end = next(
        index
        for index, other in enumerate(schedule)
        if other.opcode == "recv-done" and receive.name in other.operands
    )
    received = re.match(r"\((\S+\[[\d,]*\])", receive.type).group(1)
    sent = sum(type_bytes(scope[o].type) for o in instruction.operands[:1])
    return kind.lower(), end, type_bytes(received) if kind == "ALL_GATHER" else sent


def _end_of_pair(schedule: Sequence[Instruction], start: int) -> int:
    """Index of the last instruction of a chain that begins at `start`, or `start`."""
    names, end = {schedule[start].name}, start
    if not schedule[start].opcode.endswith("-start"):
        return end
    for index, instruction in enumerate(schedule[start + 1 :], start + 1):
        ends = instruction.opcode.endswith(("-done", "-update"))
        if ends and names & set(instruction.operands):
            names.add(instruction.name)
            end = index
    return end


def _has_compute(schedule: Sequence[Instruction], start: int, end: int) -> bool:
    return any(
        instruction.opcode in _COMPUTE for instruction in schedule[start + 1 : end]
    )
