"""Estimates the time of a compiled program from its schedule.

The compiler states the cycles that it expects of its instructions; kernels written by
hand (Pallas) state none and count as nothing. `estimate` runs the schedule on one clock
for compute and one for links: all transfers of a device share the two directions of one
link, one at a time. A transfer hides as long as the compute between its start and its
end lasts, and is exposed for the rest. It is a model for comparing programs of one
compiler, and no prediction of seconds on a chip.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import NamedTuple

from meshpar.contracts import cost
from meshpar.contracts.collective import Collective
from meshpar.contracts.hlo import Call, HloModule
from meshpar.contracts.hlo_text import Instruction, trip_count
from meshpar.contracts.host_transfers import host_bytes

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class LoopTime:
    """One loop of a program.

    Attributes:
      source: "file:line" whose instructions cost most of it; "" if unknown.
      rounds: number of times that its body runs per step.
      cycles: of all rounds, with the loops inside.
      exposed_seconds: for which its transfers outlast compute, in all rounds.
    """

    source: str
    rounds: int
    cycles: float
    exposed_seconds: float


@dataclasses.dataclass(frozen=True)
class StepTime:
    """An estimate of the time of one call of a program, on one device.

    Attributes:
      cycles: that the compiler expects of all instructions.
      compute_seconds: the same at the clock rate of the chip.
      exposed_seconds: for which transfers outlast the compute beside them.
      transfer_seconds: of all transfers, hidden or exposed.
      loops: those that cost most, in the order of their cost.
      sources: ("file:line", cycles) that cost most, in the order of their cost.
    """

    cycles: float
    compute_seconds: float
    exposed_seconds: float
    transfer_seconds: float
    loops: tuple[LoopTime, ...] = ()
    sources: tuple[tuple[str, float], ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of compute and of transfers that compute does not hide."""
        return self.compute_seconds + self.exposed_seconds


_MOST = 8
"""Loops and source lines that are listed."""


class Rates(NamedTuple):
    """The rates of a chip, per second.

    Attributes:
      clock: cycles.
      link: bytes over one link to another chip, one way.
      host: bytes over the link to the host, one way.
    """

    clock: float
    link: float
    host: float


def estimate(text: str, mesh: Mapping[str, int], rates: Rates) -> StepTime | None:
    """Estimates the time of a compiled program.

    Args:
      text: `jax.stages.Compiled.as_text()`.
      mesh: {axis: size}, outer to inner.
      rates: of a device.

    Returns:
      The estimate; None if the text states no cycles.
    """
    if not _CYCLES.search(text):
        return None
    return _Schedule(text, mesh, rates).estimate()


class _Time(NamedTuple):
    """Time of one run of a computation, or of several."""

    cycles: float = 0.0
    exposed: float = 0.0
    transfers: float = 0.0

    def seconds(self, clock_rate: float) -> float:
        """Seconds of compute and of transfers that compute does not hide."""
        return self.cycles / clock_rate + self.exposed

    def times(self, count: int) -> "_Time":
        return _Time(*(count * x for x in self))

    def plus(self, other: "_Time") -> "_Time":
        return _Time(*map(sum, zip(self, other, strict=True)))


class _Transfer(NamedTuple):
    """One run of a transfer.

    Attributes:
      end: index of the instruction that waits for it; that of its start if it waits.
      link: that it occupies.
      seconds: if it has the link for itself.
    """

    end: int
    link: str
    seconds: float


class _Schedule:
    """The instructions of a program, with the cycles and transfers of each."""

    def __init__(self, text: str, mesh: Mapping[str, int], rates: Rates):
        self.program, self.rates = HloModule(text, mesh), rates
        self.loops: list[LoopTime] = []
        self.sources: collections.Counter[str] = collections.Counter()
        # {computation: {index of the start: transfers}}
        self.transfers: dict[str, dict[int, list[_Transfer]]] = {}
        self._read_collectives()
        self._read_host_transfers()

    def _add(self, computation: str, start: int, transfer: _Transfer) -> None:
        starts = self.transfers.setdefault(computation, {})
        starts.setdefault(start, []).append(transfer)

    def _read_collectives(self) -> None:
        """Fills `transfers`; those of a computation that is called twice count once."""
        seen = set()
        for fragments in self.program.chains(Call(self.program.entry)):
            first = fragments[0]
            start = min(fragment.index for fragment in fragments)
            end = max(max(f.index, f.end) for f in fragments)
            key = first.computation, start, end, first.collective.computation
            if first.chain is None:
                key = *key, first.collective.payload_bytes, first.collective.kind
            if key in seen:
                continue
            seen.add(key)
            transfer = _Transfer(end, "chips", self._seconds(first.collective))
            self._add(first.computation, start, transfer)

    def _read_host_transfers(self) -> None:
        """Adds transfers between device and host memory to `transfers`."""
        for name, computation in self.program.computations.items():
            schedule = list(computation.values())
            for start, instruction in enumerate(schedule):
                sizes = host_bytes(instruction)
                for link, size in zip(("to device", "to host"), sizes, strict=True):
                    if size:
                        end, seconds = _done(schedule, start), size / self.rates.host
                        self._add(name, start, _Transfer(end, link, seconds))

    def _seconds(self, collective: Collective) -> float:
        """Time of one run of a collective that has the links for itself."""
        kind, size = collective.kind, collective.payload_bytes
        sent = cost.wire_bytes(kind, size, collective.group_size)
        return sent / (2 * self.rates.link)

    def estimate(self) -> StepTime:
        """The time of the whole program."""
        time = self._run(self.program.entry, 1)
        self.loops.sort(key=lambda loop: loop.cycles, reverse=True)
        return StepTime(
            cycles=time.cycles,
            compute_seconds=time.cycles / self.rates.clock,
            exposed_seconds=time.exposed,
            transfer_seconds=time.transfers,
            loops=tuple(self.loops[:_MOST]),
            sources=tuple(self.sources.most_common(_MOST)),
        )

    def _run(self, computation: str, executions: int) -> _Time:
        """The time of one run of a computation.

        Args:
          computation: its name.
          executions: number of its runs, for `loops` and `sources`.
        """
        starts = self.transfers.get(computation, {})
        ends: dict[int, list[float]] = {}
        total, now = _Time(), 0.0
        free: dict[str, float] = {}  # {link: when it is}
        schedule = self.program.computations[computation].values()
        for index, instruction in enumerate(schedule):
            for finish in ends.pop(index, ()):
                wait = max(0.0, finish - now)
                now += wait
                total = total.plus(_Time(exposed=wait))
            for end, link, seconds in starts.get(index, ()):
                finish = max(now, free.get(link, 0.0)) + seconds
                total = total.plus(_Time(transfers=seconds))
                free[link] = finish
                if end > index:
                    ends.setdefault(end, []).append(finish)
                else:
                    total = total.plus(_Time(exposed=finish - now))
                    now = finish
            inner = self._inside(instruction, executions)
            total = total.plus(inner)
            now += inner.seconds(self.rates.clock)
        return total

    def _inside(self, instruction: Instruction, executions: int) -> _Time:
        """The time of one instruction, with the computations that it runs."""
        if instruction.opcode == "while":
            body = re.search(r"body=%?([\w.\-]+)", instruction.line).group(1)
            rounds = trip_count(instruction, self.program.computations)
            before = self.sources.copy()
            time = self._run(body, executions * rounds).times(rounds)
            costs = self.sources - before
            source = costs.most_common(1)[0][0] if costs else ""
            whole = time.times(executions)
            self.loops.append(
                LoopTime(source, executions * rounds, whole.cycles, whole.exposed)
            )
            return time
        if instruction.opcode == "conditional":
            return self._slowest(instruction.callees, executions)
        if instruction.opcode == "call":
            return self._run(instruction.callees[0], executions)
        if not (match := _CYCLES.search(instruction.line)):
            return _Time()
        cycles = float(match.group(1))
        if frame := re.search(r"stack_frame_id=(\d+)", instruction.line):
            if source := self.program.sources.get(frame.group(1)):
                self.sources[source] += executions * cycles
        return _Time(cycles=cycles)

    def _slowest(self, branches: list[str], executions: int) -> _Time:
        """The time of the slowest branch, which alone counts in `loops` and `sources`.

        Other devices wait for the one that takes it.
        """
        outside, found = (self.loops, self.sources), []
        for name in branches:
            self.loops, self.sources = [], collections.Counter()
            time = self._run(name, executions)
            found.append((time, self.loops, self.sources))
        self.loops, self.sources = outside
        time, loops, sources = max(found, key=lambda b: b[0].seconds(self.rates.clock))
        self.loops += loops
        self.sources.update(sources)
        return time


def _done(schedule: list[Instruction], start: int) -> int:
    """Index of the instruction that waits for a transfer; `start` if none does."""
    name = schedule[start].name
    for index in range(start + 1, len(schedule)):
        instruction = schedule[index]
        if instruction.opcode.endswith("-done") and name in instruction.operands:
            return index
    return start
