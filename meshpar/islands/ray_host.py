"""Host of islands in Ray: every island and every server is a process of its own.

A process may be killed at any time. The batch of an island that dies goes to another
one, and a new process takes its place; a server's ranges are taken from their replicas.
"""

import contextlib
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from meshpar.errors import MeshparError
from meshpar.islands.algorithms import mode_decoders, server_update
from meshpar.islands.host import Host, Stopped, StoreLostError, WorkerDied
from meshpar.islands.messages import Join, Leave, SetValues
from meshpar.islands.mode import Islands
from meshpar.islands.ray_client import RayClient, RayReads, result
from meshpar.islands.ray_island import IslandProcess
from meshpar.islands.ray_servers import Coordination
from meshpar.islands.ray_start import start_ray
from meshpar.islands.rules import Rules
from meshpar.islands.weights_vector import weights_vector
from meshpar.islands.worker import Span
from meshpar.lowering.train_program import TrainProgram
from meshpar.mesh.platform import CPU, platform_of

_TAKEN_OVER_S = 60.0
"""Time in which another server takes over what a dead one held, in seconds."""

_LOOK_S = 0.2
"""Seconds after which a thread looks again at the island that it waits for."""


def start_servers(
    ranges: list, make_rules: Callable[[], Rules], servers: int, replicas: int
) -> Any:
    """Starts the servers of a store; returns the handle of their coordinator.

    Replicas of a range are on different nodes where the cluster has several.
    """
    options = dict(num_cpus=0, max_concurrency=1000)
    spread = options | dict(scheduling_strategy="SPREAD")
    actor = ray.remote(Coordination).options(**options)
    coordinator = actor.remote(ranges, make_rules, servers, replicas, spread)
    result(coordinator.start.remote(coordinator))
    return coordinator


def _is_importable(name: str) -> bool:
    """Whether another process finds a module by its name."""
    finders = [getattr(finder, "find_spec", None) for finder in sys.meta_path]
    return any(find(name, None) for find in finders if find)


def _carry_modules() -> None:
    """Sends code of files that were not imported by their name, such as recipes."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and "." not in name and name != "__main__" and not _is_importable(name):
            ray.cloudpickle.register_pickle_by_value(module)


def _check_pickles(build: Callable[[], TrainProgram], mode: Islands) -> None:
    """Raises MeshparError unless processes can get a program and the mode's filters."""
    parts = [("model and optimizer", build)]
    parts += [(f"filter {part}", part) for part in mode.filters]
    for what, part in parts:
        try:
            ray.cloudpickle.dumps(part)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise MeshparError(
                f"islands: host=ray sends {what} to processes, and {error}: move what "
                "cannot be pickled to the top of a module, or use host=threads"
            ) from error


def _spans(actor: Any) -> list[Span]:
    """The activities of an island; [] if it is dead."""
    try:
        return result(actor.spans.remote(), timeout=2.0)
    except (StoreLostError, ray.exceptions.RayError):
        return []


class RayHost(Host):
    """Islands in processes of their own, on one machine or a cluster.

    Takes the arguments of `Threads`, and first `build`, which makes the program of an
    island in its process.
    """

    def __init__(
        self,
        build: Callable[[], TrainProgram],
        mode: Islands,
        programs: list[TrainProgram],
        start: Sequence[np.ndarray],
        center_N: np.ndarray,
        snapshot: Mapping[str, np.ndarray] | None = None,
    ):
        super().__init__(mode.workers, mode.own_data)
        _carry_modules()
        _check_pickles(build, mode)
        start_ray()
        self._compiled = tempfile.TemporaryDirectory(prefix="meshpar-islands-")
        self._build, self._mode, self._start = build, mode, ray.put(list(start))
        self._program = programs[0]
        self._vector = weights_vector(programs[0])
        self._slices = self._vector.slices(mode.ranges)
        self._ranges = [part.range.name for part in self._slices]

        def make_rules() -> Rules:
            update, quorum = server_update(mode), mode.quorum or None
            rest = mode.grace, mode_decoders(mode), mode.history
            return Rules(mode.consistency, update, quorum, *rest)

        ranges = [part.range for part in self._slices]
        self._coordinator = start_servers(
            ranges, make_rules, mode.servers, mode.replicas
        )
        self._actors: list[Any] = [None] * mode.workers
        self._names: dict[int, str] = {}
        self._births = 0
        self._saved: dict[str, dict[str, np.ndarray]] = {}
        self._past: list[list[Span]] = [[] for _ in range(mode.workers)]
        client = self._client("driver")
        if snapshot is None:
            client.operate(
                [
                    SetValues(
                        part.range.name, "start", center_N[part.start : part.stop]
                    )
                    for part in self._slices
                ]
            )
            for index in range(1 if mode.warm_start else mode.workers):
                self._join_store(client, index)
        else:
            self._restore(snapshot)
        for index in range(mode.workers):
            self.join(index)

    def _client(self, name: str) -> RayClient:
        return RayClient(f"{name}, {time.monotonic_ns()}", self._coordinator)

    def _join_store(self, client: RayClient, index: int) -> int:
        with self.changed:
            self._births += 1
            name = self._names[index] = f"island {index}, {self._births}"
        clock = max(0, client.slowest(self._ranges))
        client.operate([Join(r, name, clock) for r in self._ranges])
        return clock

    def connect(self, index: int) -> None:
        """Makes the worker; it joins once its process is ready to train."""
        platform, count = platform_of(self._program.mesh), self._program.mesh.size
        options: dict[str, Any] = dict(num_cpus=0, max_concurrency=2)
        if platform is not CPU:
            options |= dict(num_gpus=count)
        actor = ray.remote(IslandProcess).options(**options).remote()
        settings = self._build, self._mode, self._start, count, platform.name
        self._call(index, actor.make.remote(*settings, self._compiled.name))
        clock = 0
        if index not in self._names:
            client = self._client(f"join {index}")
            self._wait_for_warm_start(client, index)
            clock = self._join_store(client, index)
        member = self._names[index], self._slices, self._coordinator, clock
        self._call(index, actor.begin.remote(*member))
        if (saved := self._saved.pop(str(index), None)) is not None:
            self._call(index, actor.restore.remote(saved))
        self._actors[index] = actor

    def _wait_for_warm_start(self, client: RayClient, index: int) -> None:
        """Waits until the first island has made enough steps alone."""
        pushes = -(-self._mode.warm_start // self._mode.push)
        while index and pushes and client.slowest(self._ranges) < pushes:
            with self.changed:
                self.waiting(index, True)
            if self.is_stopped(index):
                raise Stopped
            time.sleep(0.1)

    def _call(
        self, index: int, ref: Any, meanwhile: Callable[[], None] = lambda: None
    ) -> Any:
        """The result of an actor's method.

        Args:
          index: of the island.
          ref: what the method returned.
          meanwhile: called now and then until the result is there.

        Raises:
          WorkerDied: its process is gone.
          Stopped: the island has to leave.
        """
        try:
            while not ray.wait([ref], timeout=_LOOK_S)[0]:
                if self.is_stopped(index):
                    raise Stopped
                meanwhile()
            return ray.get(ref)
        except ray.exceptions.RayActorError as error:
            raise WorkerDied(str(error)) from error

    def prepare(self, index: int) -> None:
        """Waits until an island needs a batch.

        An island that is ahead of the others pulls until they have pushed. Nobody must
        wait for it: they may have no batches. What it reads meanwhile is read again
        after a snapshot.
        """
        actor = self._actors[index]

        def look() -> None:
            pulling = ray.get(actor.pulling.remote())
            with self.changed:
                self.waiting(index, pulling)

        self._call(index, actor.prepare.remote(), look)

    def train(self, index: int, batch: Any) -> Mapping[str, float]:
        return self._call(index, self._actors[index].train.remote(batch))

    def disconnect(self, index: int) -> None:
        with self.changed:
            name, actor = self._names.pop(index, None), self._actors[index]
            self._actors[index] = None
        if actor is not None:
            self._past[index] += _spans(actor)
            ray.kill(actor)
        if name is not None and ray.is_initialized():
            client = self._client(f"leave {index}")
            client.operate([Leave(r, name) for r in self._ranges])

    def close(self) -> None:
        """All islands leave, and the servers end as well."""
        super().close()
        if ray.is_initialized():
            with contextlib.suppress(StoreLostError):  # Nothing is left to end.
                _, handles = result(self._coordinator.view.remote())
                for handle in handles.values():
                    ray.kill(handle)
        self._compiled.cleanup()

    def center(self) -> np.ndarray:
        found = self._client("reader").read(
            [(name,) + ("", 0) for name in self._ranges]
        )
        return np.concatenate([values.values for values in found])

    @property
    def reader(self) -> Callable[[int | None], tuple[int, np.ndarray]]:
        return RayReads(self._coordinator, tuple(self._ranges))

    def pids(self) -> tuple[dict[int, int], dict[str, int]]:
        """Ids of the processes: {island: id}, {server: id}."""
        pids = {i: a.pid.remote() for i, a in enumerate(self._actors) if a is not None}
        servers = result(self._coordinator.pids.remote())
        return {i: result(ref) for i, ref in pids.items()}, servers

    def resize(self, servers: int) -> None:
        """Servers join or leave, until there are so many."""
        result(self._coordinator.resize.remote(servers))

    def spans(self) -> list[list[Span]]:
        return [
            past + (_spans(actor) if actor is not None else [])
            for past, actor in zip(self._past, self._actors, strict=True)
        ]

    def snapshot(self) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {}
        for name in self._ranges:
            state = self._state_of(name)
            arrays |= {f"store|{name}|{k}": v for k, v in state.items()}
        for index, actor in enumerate(self._actors):
            if actor is not None:
                own = result(actor.snapshot.remote())
                arrays |= {f"{index}|{k}": v for k, v in own.items()}
        meta = json.dumps([self._births, self._names]).encode()
        return arrays | {"names": np.frombuffer(meta, np.uint8)}

    def _state_of(self, name: str) -> dict[str, np.ndarray]:
        """The state of a range; waits while another server takes it over.

        Raises:
          StoreLostError: nobody has it.
        """
        until = time.monotonic() + _TAKEN_OVER_S
        while True:
            view, handles = result(self._coordinator.view.remote())
            server = view.chains[name][-1]
            try:
                if (tail := handles.get(server)) is not None:
                    if (state := ray.get(tail.snapshot.remote(name))) is not None:
                        return state
            except ray.exceptions.RayActorError:
                result(self._coordinator.report.remote(server))
            if time.monotonic() > until:
                raise StoreLostError(
                    f"range {name} was not in place for {_TAKEN_OVER_S:.0f} s; run the "
                    "same command again"
                )
            time.sleep(0.1)

    def _restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        parts: dict[str, dict[str, Any]] = {}
        for key, array in snapshot.items():
            kind, _, rest = key.partition("|")
            parts.setdefault(kind, {})[rest] = array
        ranges: dict[str, dict[str, np.ndarray]] = {}
        for key, array in parts.pop("store").items():
            name, _, rest = key.partition("|")
            ranges.setdefault(name, {})[rest] = array
        view, handles = result(self._coordinator.view.remote())
        for name, state in ranges.items():
            for server in view.chains[name]:
                result(handles[server].restore.remote(name, state))
        self._births, names = json.loads(parts.pop("names")[""].tobytes())
        self._names = {int(index): name for index, name in names.items()}
        self._saved = parts
