r"""Compares the store in Ray with a plain Ray actor around one numpy array.

    python -m experiments.benchmarks.store --mb=100

Both move the same bytes in one run, and take turns in being first; ratios are of
medians. Small messages are compared as well. Needs `pip install -e ".[islands]"`.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import flags

from meshpar.commands import command_line
from meshpar.islands import ASP, KeyRange, Payload, updates
from meshpar.islands.messages import Join
from meshpar.islands.rules import Rules
from meshpar.settings import Number

MB = flags.DEFINE_integer("mb", 100, "Megabytes of a push and of a pull.")
ROUNDS = flags.DEFINE_integer("rounds", 15, "Timed pushes and pulls.")
SERVERS = flags.DEFINE_list("servers", ["1", "2", "4"], "Numbers of servers.")
_PAUSE_S = 0.03
"""Seconds in which Ray frees the memory of the last call."""

command_line.limit(MB, Number(1, 4096, "MB"))
command_line.limit(ROUNDS, Number(1, 10_000, "rounds"))


class PlainActor:
    """An array that adds what it gets."""

    def __init__(self, size: int):
        self._values = np.zeros(size, np.float32)

    def push(self, values: np.ndarray) -> None:
        """Adds values."""
        self._values += values

    def pull(self) -> np.ndarray:
        """The array."""
        return self._values


def _rules() -> Rules:
    return Rules(ASP(), updates.add)


def _store(size: int, servers: int) -> tuple[Callable, Callable, Callable]:
    """(push, pull, stop) of a store with one range per server."""
    import ray

    from meshpar.islands.ray_client import RayClient
    from meshpar.islands.ray_host import start_servers

    ranges = [KeyRange(f"range {i}", size // servers) for i in range(servers)]
    coordinator = start_servers(ranges, _rules, servers, 1)
    client, clock = RayClient("benchmark", coordinator), iter(range(10**9))
    client.operate([Join(r.name, "worker", 0) for r in ranges])

    def push(values: np.ndarray) -> None:
        parts = np.split(values, servers)
        named = zip(ranges, parts, strict=True)
        payloads = {r.name: Payload((None, part)) for r, part in named}
        client.push("worker", next(clock), payloads)

    def pull() -> None:
        client.read([(r.name, "", 0) for r in ranges])

    def stop() -> None:
        _, handles = ray.get(coordinator.view.remote())
        for handle in handles.values():
            ray.kill(handle)

    return push, pull, stop


def _seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def compare(size: int, rounds: int, servers: int) -> dict[str, float]:
    """Medians in seconds of the plain actor and of a store, in turns."""
    import ray

    plain = ray.remote(PlainActor).options(num_cpus=0).remote(size)
    push, pull, stop = _store(size, servers)
    values, times = np.ones(size, np.float32), {}
    pushes = {
        "plain push": lambda: ray.get(plain.push.remote(values)),
        "push": lambda: push(values),
    }
    pulls = {"plain pull": lambda: ray.get(plain.pull.remote()), "pull": pull}
    for number in range(rounds + 2):
        for actions in (pushes, pulls):
            for name in sorted(actions, reverse=number % 2 == 1):
                seconds = _seconds(actions[name])
                time.sleep(_PAUSE_S)
                if number >= 2:
                    times.setdefault(name, []).append(seconds)
    stop()
    ray.kill(plain)
    return {name: statistics.median(found) for name, found in times.items()}


def messages_per_second(rounds: int = 5, count: int = 100) -> tuple[float, float]:
    """Answered pushes of 4 bytes per second, one by one: the store's, the actor's."""
    import ray

    plain = ray.remote(PlainActor).options(num_cpus=0).remote(1)
    push, _, stop = _store(1, 1)
    values = np.ones(1, np.float32)
    actions = (lambda: push(values), lambda: ray.get(plain.push.remote(values)))
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds):
        for action, found in zip(actions, seconds, strict=True):
            found.append(_seconds(lambda a=action: [a() for _ in range(count)]))
    stop()
    ray.kill(plain)
    own, other = (count / statistics.median(found) for found in seconds)
    return own, other


def main(_: Sequence[str]) -> int:
    """Prints the ratios, and returns the exit code."""
    from meshpar.islands.ray_start import start_ray

    start_ray()
    size = MB.value * 250_000 // 4 * 4
    for servers in map(int, SERVERS.value):
        found = compare(size, ROUNDS.value, servers)
        for kind in ("push", "pull"):
            own, plain = found[kind], found[f"plain {kind}"]
            print(
                f"{servers} server(s), {kind} of {MB.value} MB: "
                f"{MB.value / own:.0f} MB/s, plain actor {MB.value / plain:.0f} MB/s, "
                f"ratio {plain / own:.2f}"
            )
    own, plain = messages_per_second()
    print(f"messages: {own:.0f} per second, plain actor {plain:.0f}")
    return 0


if __name__ == "__main__":
    command_line.run(main)
