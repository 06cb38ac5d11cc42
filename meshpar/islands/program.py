"""The program of islands: a `TrainProgram` whose steps are done by many.

A step gives out one batch per island. The state that `step` returns is a handle: the
weights are in the store, and the islands hold theirs, until `in_model_order` or
`extra_state` reads them.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.arrays import Params, num_bytes
from meshpar.errors import MeshparError
from meshpar.islands.host import Host
from meshpar.islands.mode import Islands, need_ray
from meshpar.islands.reader import Reader
from meshpar.islands.threads import Threads
from meshpar.islands.weights_vector import WeightsVector, weights_vector
from meshpar.islands.worker import Span
from meshpar.layouts.axes import AXES
from meshpar.lowering.in_trace import is_traced
from meshpar.lowering.state import Metrics, TrainState
from meshpar.lowering.train_program import TrainProgram
from meshpar.replicated import map_rows, num_rows

BYTES = "islands"
"""Name of the packed bytes in a checkpoint."""

_SLACK = 1 << 20
"""Bytes of a checkpoint for names, clocks and counts."""


class IslandsState(NamedTuple):
    """A training state, and the bytes of the store and the islands.

    Attributes:
      step: steps done.
      seed: seed of the run.
      params: the store's weights at the start.
      optimizer_state: of the first island's program.
      blob: uint8 [devices, n] of `IslandsProgram.extra_state`; None to start new.
    """

    step: Any
    seed: Any
    params: Params
    optimizer_state: Any
    blob: Any = None


@dataclasses.dataclass
class _Running:
    """The islands at work, and the step that they have reached."""

    host: Host | None = None
    step: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class IslandsProgram(TrainProgram):
    """A `TrainProgram` of islands; made by `lower(mode=Islands())`.

    What it says of layout, contract and memory is true of each island.

    Attributes:
      mode: how many islands there are, and what they exchange.
      programs: one program per island; with host="ray" one that evaluates.
      build: makes the program of an island in a process of its own, for host="ray".
    """

    mode: Islands
    programs: tuple[TrainProgram, ...]
    build: Callable[[], TrainProgram] | None = None
    _running: _Running = dataclasses.field(default_factory=_Running, compare=False)

    @functools.cached_property
    def vector(self) -> WeightsVector:
        """The weights as one vector."""
        return weights_vector(self)

    @property
    def batch_rows(self) -> np.ndarray:
        """All rows of the batch of all islands."""
        return np.arange(self.mode.workers * len(super().batch_rows))

    def _parts(self, batch: Any) -> list[Any]:
        """Cuts the batch into parts for islands; the last one may have fewer rows."""
        batch, rows = self.batches.as_arrays(batch), len(super().batch_rows)
        return [
            map_rows(lambda x, i=i: x[i : i + rows], batch)
            for i in range(0, num_rows(batch), rows)
        ]

    # Training.

    def init(self, seed: int = 0, params: Any = None) -> TrainState:
        """Makes a state, from which the store and all islands start."""
        return super().init(seed, params)

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Gives every island a batch; the islands are at most one step behind.

        Args:
          state: the result of `init`, `as_stored` or the last call.
          batch: host arrays [workers * batch of an island, ...]; an island that is
            faster takes more of the parts.

        Returns:
          The next state, and metrics of what got done since: means over batches,
          bytes pushed and pulled, and of every island `compute_seconds/I`,
          `wait_seconds/I`, its `clock/I` and the `age/I` of what it read, in clocks.

        Raises:
          MeshparError: an older state, or an island that failed.
        """
        if is_traced((state, batch)):
            self._check_in_trace()
        step = int(state.step)
        if self._running.host is None:
            self._start(state)
        elif step != self._running.step:
            raise MeshparError(
                f"the islands are at step {self._running.step}, the state is of step "
                f"{step}: go on from the newest state"
            )
        metrics = self._running.host.step(self._parts(batch))
        self._running.step = step + 1
        return state._replace(step=np.int32(step + 1)), metrics

    def _start(self, state: TrainState) -> None:
        snapshot = None
        if isinstance(state, IslandsState) and state.blob is not None:
            snapshot = unpacked(np.asarray(jax.device_get(state.blob)).reshape(-1))
        leaves = jax.tree.leaves(jax.device_get(TrainState(*state[:4])))
        start = list(map(np.asarray, leaves))
        center_N = self.vector.pack(state.params)
        make = Threads if self.build is None else _ray_host(self.build)
        host = make(self.mode, list(self.programs), start, center_N, snapshot)
        self._running.host, self._running.step = host, int(state.step)

    @property
    def host(self) -> Host | None:
        """The islands at work; None before the first step."""
        return self._running.host

    def spans(self) -> list[list[Span]]:
        """The activities of every island, for a picture."""
        return self._running.host.spans() if self._running.host else []

    def close(self) -> None:
        """Ends the islands."""
        if self._running.host:
            self._running.host.close()

    # Weights.

    def evaluated_params(self, state: TrainState) -> Params:
        """The store's weights, {path: array}."""
        if self._running.host is None or int(state.step) != self._running.step:
            return state.params
        center = self.vector.unpack(self._running.host.center())
        return {**state.params, **center}

    def evaluate(
        self, state: TrainState, batch: Any, rows: int | None = None
    ) -> Metrics:
        """Metrics of the store's weights on a batch."""
        del rows  # One process holds them all.
        params, sums = self.evaluated_params(state), self.metric_sums()
        for part in self._parts(batch):
            sums.add(self.evaluate_params(params, part))
        return sums.result()

    def reader(self) -> Reader:
        """Reads whole versions of the weights while islands train (`mode.history`).

        Raises:
          MeshparError: before the first step.
        """
        if self._running.host is None:
            raise MeshparError("the islands have no weights yet: make a step first")
        return Reader(self.vector.without_devices(), self._running.host.reader)

    # Checkpoints.

    def in_model_order(self, state: TrainState) -> TrainState:
        """The store's weights, once all islands wait."""
        if self._running.host is not None:
            self._running.host.drain()
        params = self.evaluated_params(state)
        whole = NamedSharding(self.mesh, PartitionSpec())
        step = jax.device_put(np.int32(int(state.step)), whole)
        return TrainState(step, state.seed, params, state.optimizer_state)

    def extra_state(self, state: TrainState) -> Any:
        """The store, with every clock, and the islands."""
        if self._running.host is None:
            blob = getattr(state, "blob", None)
            return self._packed({}) if blob is None else {BYTES: blob}
        self._running.host.drain()
        return self._packed(self._running.host.snapshot())

    def extra_numbers(self, extra: Any) -> dict[str, np.ndarray]:
        """The arrays of the store and the islands, by name."""
        return unpacked(np.asarray(jax.device_get(extra[BYTES])).reshape(-1))

    def _packed(self, arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        (like,) = jax.tree.leaves(self.abstract_extra)
        blob = packed(arrays, like.size)
        return {BYTES: jax.device_put(blob.reshape(like.shape), like.sharding)}

    @functools.cached_property
    def abstract_extra(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Bytes [devices, n] that `extra_state` packs."""
        workers, vector = self.mode.workers, 4 * self.vector.size
        kept = self.mode.history + bool(self.mode.history)
        store = (3 + kept) * vector + 4 * vector * workers * self.mode.in_rounds
        own = sum(map(num_bytes, jax.tree.leaves(self.abstract_state)))
        remembered = vector * sum(part.remembers for part in self.mode.filters)
        store += workers * remembered
        island = own + 5 * vector + 2 * remembered
        devices = self.mesh.size
        size = -(-(store + workers * island + _SLACK) // devices)
        sharding = NamedSharding(self.mesh, PartitionSpec(AXES))
        shape = (devices, size)
        return {BYTES: jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=sharding)}

    @property
    def extra_identity(self) -> str:
        """The mode to which `extra_state` belongs."""
        return self.mode.identity()

    def as_stored(self, state: TrainState, extra: Any = None) -> TrainState:
        """The whole state; without `extra` the store and all islands start from it."""
        blob = extra[BYTES] if extra is not None else None
        if blob is not None and not self.extra_numbers(extra):
            blob = None
        return IslandsState(*super().as_stored(state), blob)

    @property
    def mode_text(self) -> str:
        """One line about the mode: islands, algorithm, consistency and servers."""
        mode = self.mode
        return (
            f"islands: {mode.workers} of {self.mesh.size} device(s), {mode.algorithm}, "
            f"{mode.consistency}, {mode.servers} server(s), {mode.replicas} replica(s)"
        )

    @property
    def reason_not_equal(self) -> str:
        """Islands train apart on purpose."""
        return (
            "islands train at their own pace, and do not equal one device: verify the "
            "layout of one island without the mode"
        )

    def __str__(self) -> str:
        return self.mode_text


def _ray_host(build: Callable[[], TrainProgram]) -> Callable[..., Host]:
    """The host of Ray, which builds programs in processes of their own.

    Raises:
      MeshparError: Ray is not installed.
    """
    need_ray()
    from meshpar.islands.ray_host import RayHost

    return functools.partial(RayHost, build)


def packed(arrays: Mapping[str, np.ndarray], size: int) -> np.ndarray:
    """A flat dict of arrays as uint8 [size], so that checkpoints know its shape.

    Raises:
      MeshparError: it does not fit.
    """
    table, parts, start = [], [], 0
    for name, array in arrays.items():
        array = np.array(array, order="C")
        table.append([name, array.dtype.str, list(array.shape), start])
        parts.append(array.reshape(-1).view(np.uint8))
        start += array.nbytes
    head = json.dumps(table).encode()
    total = 8 + len(head) + start
    if total > size:
        raise MeshparError(
            f"the state of the islands has {total} bytes, and checkpoints of this run "
            f"have room for {size}: use fewer islands, or more frequent pushes"
        )
    blob = np.zeros(size, np.uint8)
    blob[:8] = np.frombuffer(np.int64(len(head)).tobytes(), np.uint8)
    blob[8 : 8 + len(head)] = np.frombuffer(head, np.uint8)
    blob[8 + len(head) : total] = np.concatenate([*parts, np.zeros(0, np.uint8)])
    return blob


def unpacked(blob: np.ndarray) -> dict[str, np.ndarray]:
    """The inverse of `packed`."""
    length = int(np.frombuffer(blob[:8].tobytes(), np.int64)[0])
    start = 8 + length
    arrays = {}
    for name, dtype, shape, offset in json.loads(blob[8:start].tobytes()):
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        part = blob[start + offset : start + offset + count].tobytes()
        arrays[name] = np.frombuffer(part, dtype).reshape(shape).copy()
    return arrays
