"""A worker of the simulator: joins, then pulls, computes and pushes for some clocks."""

from collections.abc import Callable, Mapping
from typing import Any

from meshpar.islands.client import Client
from meshpar.islands.messages import (
    Done,
    Join,
    Leave,
    Payload,
    Push,
    Send,
    Values,
)
from meshpar.islands.simulator import Simulator
from meshpar.islands.worker import Span

Task = Callable[[str, int, Mapping[str, Values]], Mapping[str, Payload | None]]
"""(worker, clock, {range: what was read}) -> {range: what to push}."""


class SimulatedWorker:
    """A process of the simulator that trains.

    Args:
      simulator: where it lives.
      name: a name that no worker had before.
      steps: clocks after which it stops.
      task: what it computes.
      duration: (worker, clock) -> simulated seconds of the computation.
      retry: seconds after which it repeats requests without an answer.
      joined: whether it is a member already, at clock 0.
      keeps: number of reads to keep; 0 for all.
      stays: whether it remains a member when it is done.
      lazy: pulls again once what it has read may miss pushes that are older than so
        many clocks, as the tables of SSP do; its own later pushes are not in it. By
        default it pulls at every clock, and gets what eager SSP would push to it.

    Attributes:
      clock: pushes that it has made and that are answered.
      reads: [(clock, {range: values})] of all its pulls.
      acked: clocks whose pushes are answered.
      spans: what it did, "wait", "compute" and "push", in order.
      done: whether it has stopped.
      dead: whether it was killed.
    """

    def __init__(
        self,
        simulator: Simulator,
        name: str,
        steps: int,
        task: Task,
        duration: Callable[[str, int], float],
        retry: float = 1.0,
        joined: bool = False,
        keeps: int = 0,
        stays: bool = False,
        lazy: int | None = None,
    ):
        self.name, self.clock, self.done, self.dead = name, 0, False, False
        self.reads: list[tuple[int, dict[str, Values]]] = []
        self.acked: list[int] = []
        self.spans: list[Span] = []
        self._simulator, self._steps, self._task = simulator, steps, task
        self._duration, self._retry_time, self._stays = duration, retry, stays
        self._keeps, self._lazy = keeps, lazy
        self._client = Client(name, simulator.view)
        self._answers: list[Done | Values] = []
        self._next: Callable[[], list[Send]] = self._hello
        self._since = simulator.now
        self._names = [key_range.name for key_range in simulator.ranges]
        simulator.add_process(name, self._handle)
        simulator.send(self._pull() if joined else self._ask_clocks())
        self._retry()

    def kill(self) -> None:
        """Dies without a word."""
        self.dead = True
        self._simulator.kill_process(self.name)

    def _handle(self, message: Any) -> list[Send]:
        answer, sends = self._client.handle(message)
        if answer is not None:
            self._answers.append(answer)
            if not self._client.waits:
                sends = sends + self._next()
        return sends

    def _retry(self) -> None:
        if not self.dead and not self.done:
            self._simulator.send(self._client.retry())
            self._simulator.after(self._retry_time, self._retry)

    def _all(self, ask: Callable[[str], list[Send]], then: Callable) -> list[Send]:
        """Sends one request per range; `then` runs when all are answered."""
        self._answers, self._next = [], then
        return [send for name in self._names for send in ask(name)]

    def _span(self, kind: str) -> None:
        now = self._simulator.now
        self.spans.append(Span(kind, self._since, now))
        self._since = now

    def _ask_clocks(self) -> list[Send]:
        return self._all(self._client.pull, self._hello)

    def _hello(self) -> list[Send]:
        self.clock = max(0, *(answer.slowest for answer in self._answers))

        def join(name):
            return self._client.operate(Join(name, self.name, self.clock))

        return self._all(join, self._pull)

    def _pull(self) -> list[Send]:
        if self.clock >= self._steps:
            return self._finish()
        if self._lazy is not None and self.reads:
            read = self.reads[-1][1]
            if self.clock - min(a.slowest for a in read.values()) <= self._lazy:
                return self._begin(read)

        def pull(name):
            return self._client.pull(name, self.name, self.clock)

        return self._all(pull, self._compute)

    def _compute(self) -> list[Send]:
        if any(answer.refused for answer in self._answers):
            return self._finish()
        return self._begin({a.range: a for a in self._answers})

    def _begin(self, read: dict[str, Values]) -> list[Send]:
        self._span("wait")
        self.reads.append((self.clock, read))
        if self._keeps:
            del self.reads[: -self._keeps]
        self._simulator.after(self._duration(self.name, self.clock), self._push)
        return []

    def _push(self) -> None:
        if self.dead:
            return
        self._span("compute")
        pushes = self._task(self.name, self.clock, self.reads[-1][1])

        def push(name):
            return self._client.operate(
                Push(name, self.name, self.clock, pushes.get(name))
            )

        self._simulator.send(self._all(push, self._pushed))

    def _pushed(self) -> list[Send]:
        if any(answer.refused for answer in self._answers):
            return self._finish()
        self._span("push")
        self.acked.append(self.clock)
        self.clock += 1
        return self._pull()

    def _finish(self) -> list[Send]:
        if self._stays:
            return self._stop()
        return self._all(
            lambda name: self._client.operate(Leave(name, self.name)), self._stop
        )

    def _stop(self) -> list[Send]:
        self.done = True
        return []
