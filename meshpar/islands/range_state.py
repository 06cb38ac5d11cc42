"""The state of one key range: values, optimizer state, clocks and open rounds.

A deterministic state machine: replicas that apply the same operations in the same order
hold the same state, bit for bit. Where rounds are aggregated, the pushes of open rounds
are no part of it: the head gathers them, and nobody has been told that they are kept.
"""

import dataclasses
import json
from collections.abc import Mapping

import numpy as np

from meshpar.errors import MeshparError
from meshpar.islands.key_range import Contribution, KeyRange
from meshpar.islands.messages import (
    PLAIN,
    Aggregate,
    Close,
    Join,
    Leave,
    Operation,
    Payload,
    Push,
    SetValues,
)
from meshpar.islands.rules import RefusedError, Rules


@dataclasses.dataclass
class _Pending:
    """A push that waits for its round; without payload it only counts as present."""

    round: int
    worker: str
    clock: int
    payload: Payload | None
    keys: np.ndarray | None = None
    values: np.ndarray | None = None


class RangeState:
    """A range that applies operations.

    Attributes:
      values: numbers of the range.
      update_state: arrays of the server-side update.
      clocks: {worker: pushes that it has made}, of the members.
      round: rounds that are closed.
      version: updates that are applied, `SetValues` included.
      past: {version: values} of the newest versions, where the store keeps any.
    """

    def __init__(self, key_range: KeyRange, rules: Rules):
        self._range, self._rules = key_range, rules
        self._update_function = rules.update_of(key_range.name)
        self.values = np.zeros(key_range.size, key_range.dtype)
        self.update_state: dict[str, np.ndarray] = {}
        self.clocks: dict[str, int] = {}
        self.round = 0
        self.version = 0
        self.past: dict[int, np.ndarray] = {}
        self._keep_version()
        self._gone: set[str] = set()
        self._set: set[str] = set()
        self._cache: dict[str, np.ndarray] = {}
        self._pending: list[_Pending] = []

    def allows(self, clock: int) -> bool:
        """Whether the consistency model lets a reader at `clock` read now."""
        clocks = self.clocks.values()
        if self._rules.in_rounds:
            clocks = [self.round] * len(self.clocks)
        return self._rules.consistency.allows(clock, clocks)

    def has_gone(self, worker: str) -> bool:
        """Whether the worker was a member and left."""
        return worker in self._gone

    def duplicate(self, operation: Operation) -> bool:
        """Whether the operation has been applied before."""
        match operation:
            case Push(_, worker, clock):
                return clock < self.clocks.get(worker, 0)
            case Join(_, worker):
                return worker in self.clocks or worker in self._gone
            case Leave(_, worker):
                return worker not in self.clocks
            case Close(_, number):
                return number < self.round
            case SetValues(_, name):
                return name in self._set

    def early(self, operation: Operation) -> bool:
        """Whether a push of the same worker has to come before this one."""
        if not isinstance(operation, Push):
            return False
        return operation.clock > self.clocks.get(operation.worker, operation.clock)

    def apply(self, operation: Operation) -> None:
        """Applies an operation that is neither a duplicate nor early.

        Raises:
          RefusedError: the range does not take it; the state is as before.
        """
        match operation:
            case Push():
                self._push(operation)
            case Join(_, worker, clock):
                self.clocks[worker] = clock
            case Leave(_, worker):
                del self.clocks[worker]
                self._gone.add(worker)
            case Close(_, number):
                if number == self.round and self.has_quorum():
                    self._close()
            case SetValues(_, name, values):
                self._check(None, values)
                self.values[:] = values
                self._set.add(name)
                self._next_version()
            case Aggregate():
                self._end_round(operation)
        if self._rules.in_rounds and not self._rules.aggregate:
            self._close_complete()

    # Aggregates.

    def gather(self, push: Push) -> None:
        """Keeps a push for the aggregate of its round; once, if it is repeated.

        Raises:
          RefusedError: the range does not take it.
        """
        ids = {(p.worker, p.clock) for p in self._pending}
        if (push.worker, push.clock) not in ids:
            self._wait_for_round(push, *self._taken(push))

    def aggregate(self, grace_over: int | None = None) -> Aggregate | None:
        """The open round as an operation to apply; None if it need not close yet.

        Args:
          grace_over: a round whose grace window is over, so that its quorum is enough.
        """
        enough = grace_over == self.round and self.has_quorum()
        return self._open_round() if enough or self._complete() else None

    def drop_gathered(self) -> None:
        """Forgets the pushes that were gathered: their workers repeat them."""
        if self._rules.aggregate:
            self._pending = []

    def drop(self, closed: Aggregate) -> None:
        """Forgets the pushes of a round that waited here."""
        pushes = set(closed.pushes)
        self._pending = [p for p in self._pending if (p.worker, p.clock) not in pushes]

    def has_quorum(self) -> bool:
        """Whether the open round has its quorum, and waits for the grace window."""
        quorum = self._rules.quorum
        return quorum is not None and len(self._present()) >= quorum

    def _push(self, push: Push) -> None:
        keys, values = self._taken(push)
        if self._rules.in_rounds:
            self._wait_for_round(push, keys, values)
        elif push.payload is not None:
            self._update(
                self._contribution(push.worker, push.clock, push.payload, keys, values)
            )
        self.clocks[push.worker] += 1  # Last: an update may refuse the push.

    def _taken(self, push: Push) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Keys and values of a push; RefusedError if the range does not take it."""
        if push.worker not in self.clocks:
            raise RefusedError(
                f"worker {push.worker} is no member of range {push.range}"
            )
        return (None, None) if push.payload is None else self._decode(push.payload)

    def _wait_for_round(
        self, push: Push, keys: np.ndarray | None, values: np.ndarray | None
    ) -> None:
        number = self.round
        if self._rules.consistency.waits:
            number = max(number, push.clock)
        new = _Pending(number, push.worker, push.clock, push.payload, keys, values)
        for other in self._pending if values is not None else ():
            same = (other.keys is None) == (keys is None)
            if other.round == number and other.values is not None and not same:
                raise RefusedError(
                    f"{push.range}: a round mixes dense and sparse pushes: use one kind"
                )
        self._pending.append(new)

    def _decode(self, payload: Payload) -> tuple[np.ndarray | None, np.ndarray]:
        if not payload.weight > 0:
            raise RefusedError(f"weight={payload.weight}: use a number > 0")
        if payload.encoding == PLAIN:
            keys, values = payload.data
        else:
            decode = self._rules.decoders.get(payload.encoding)
            if decode is None:
                raise RefusedError(f"no decoder for the encoding {payload.encoding!r}")
            cache = {} if self._rules.aggregate else self._cache
            try:
                keys, values = decode(payload.data, self._range.size, cache)
                keys = None if keys is None else np.asarray(keys)
                values = np.asarray(values)
            except RefusedError:
                raise
            except Exception as error:  # Else a server in Ray would seem to be dead.
                raise RefusedError(
                    f"{self._range.name}: the decoder of {payload.encoding!r} gives no "
                    f"pair (sorted keys or None, values): {type(error).__name__}: "
                    f"{error}"
                ) from error
            if self._rules.aggregate and cache:
                raise RefusedError(
                    f"{self._range.name}: the decoder of {payload.encoding!r} keeps "
                    "arrays between pushes, and replicas of aggregates see no push: "
                    "use aggregate=False"
                )
        self._check(keys, values)
        return keys, values

    def _check(self, keys: np.ndarray | None, values: np.ndarray) -> None:
        """Raises RefusedError unless keys and values fit the range."""
        size, name = self._range.size, self._range.name
        wanted = (size,) if keys is None else keys.shape
        if values.shape != wanted or len(wanted) != 1:
            raise RefusedError(f"{name}: values of shape {values.shape}, not {wanted}")
        if keys is not None and keys.dtype.kind not in "iu":
            raise RefusedError(f"{name}: keys are {keys.dtype}: use whole numbers")
        if keys is not None and len(keys):
            if keys[0] < 0 or keys[-1] >= size or (np.diff(keys) <= 0).any():
                raise RefusedError(
                    f"{name}: keys are not sorted, unique and below {size}"
                )

    def _contribution(
        self,
        worker: str,
        clock: int,
        payload: Payload,
        keys: np.ndarray | None,
        values: np.ndarray,
    ) -> Contribution:
        staleness = 0
        if payload.version >= 0:
            staleness = max(0, self.version - payload.version)
        weight, read = payload.weight, payload.read
        return Contribution(worker, clock, values, keys, weight, staleness, read)

    def _update(self, contribution: Contribution) -> None:
        self._update_function(self.values, self.update_state, contribution)
        self._next_version()

    def _next_version(self) -> None:
        self.version += 1
        self._keep_version()

    def _keep_version(self) -> None:
        if history := self._rules.history:
            self.past[self.version] = self.values.copy()
            oldest = self.version - history
            self.past = {v: x for v, x in self.past.items() if v >= oldest}

    def values_at(self, version: int) -> np.ndarray | None:
        """The values of a version that was reached; None if they are not kept."""
        return self.values if version == self.version else self.past.get(version)

    def _present(self) -> set[str]:
        return {p.worker for p in self._pending if p.round <= self.round}

    def _complete(self) -> bool:
        """Whether the open round need not wait for anybody."""
        if not self.clocks:
            return bool(self._pending)
        if self._rules.grace == 0 and self.has_quorum():
            return True
        present = self._present()
        if self._rules.consistency.waits:
            return all(w in present or c > self.round for w, c in self.clocks.items())
        return present >= set(self.clocks)

    def _close_complete(self) -> None:
        while self._complete():
            self._close()

    def _close(self) -> None:
        self._end_round(self._open_round())

    def _open_round(self) -> Aggregate:
        """The pushes of the open round, and their average."""
        parts = [p for p in self._pending if p.round <= self.round]
        parts.sort(key=lambda p: (p.worker, p.clock))
        contributions = [
            self._contribution(p.worker, p.clock, p.payload, p.keys, p.values)
            for p in parts
            if p.payload is not None
        ]
        average = _average(contributions, self.round) if contributions else None
        pushes = tuple((p.worker, p.clock) for p in parts)
        return Aggregate(self._range.name, self.round, pushes, average)

    def _end_round(self, closed: Aggregate) -> None:
        """Applies the average of a round, and opens the next one."""
        if closed.average is not None:
            self._update(closed.average)
        self.drop(closed)
        for worker, clock in closed.pushes:
            if worker in self.clocks:
                self.clocks[worker] = max(self.clocks[worker], clock + 1)
        self.round += 1

    def snapshot(self) -> dict[str, np.ndarray]:
        """A copy of the whole state as a flat dict of arrays."""
        meta = dict(
            clocks=self.clocks,
            gone=sorted(self._gone),
            set=sorted(self._set),
            round=self.round,
            version=self.version,
            pending=[],
        )
        arrays = {"values": self.values.copy()}
        arrays |= {f"update|{k}": np.array(v) for k, v in self.update_state.items()}
        arrays |= {f"cache|{k}": np.array(v) for k, v in self._cache.items()}
        arrays |= {f"past|{k}": v.copy() for k, v in self.past.items()}
        pending = [] if self._rules.aggregate else self._pending
        for i, part in enumerate(pending):
            payload = part.payload
            meta["pending"].append(
                [part.round, part.worker, part.clock]
                + ([payload.weight, payload.version] if payload else [])
            )
            for name in ("keys", "values"):
                if (array := getattr(part, name)) is not None:
                    arrays[f"pending|{i}|{name}"] = array.copy()
        text = json.dumps(meta).encode()
        return arrays | {"meta": np.frombuffer(text, np.uint8).copy()}

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        """Takes the state of a snapshot of the same range.

        Raises:
          MeshparError: a round is open in it, and this store aggregates rounds.
        """
        meta = json.loads(np.asarray(snapshot["meta"], np.uint8).tobytes())
        if meta["pending"] and self._rules.aggregate:
            raise MeshparError(
                f"range {self._range.name}: {len(meta['pending'])} answered pushes of "
                "an open round are in the snapshot, and a store with aggregate=True "
                "has no place for them; use aggregate=False"
            )
        self.clocks = dict(meta["clocks"])
        self._gone, self._set = set(meta["gone"]), set(meta["set"])
        self.round, self.version = meta["round"], meta["version"]
        self.values = np.array(snapshot["values"], self._range.dtype)
        self.update_state, self._cache, self._pending = {}, {}, []
        self.past = {}
        for name, array in snapshot.items():
            kind, _, rest = name.partition("|")
            if kind == "update":
                self.update_state[rest] = np.array(array)
            elif kind == "cache":
                self._cache[rest] = np.array(array)
            elif kind == "past" and self._rules.history:
                self.past[int(rest)] = np.array(array)
        self._keep_version()
        for i, (number, worker, clock, *payload) in enumerate(meta["pending"]):
            parts = [snapshot.get(f"pending|{i}|{name}") for name in ("keys", "values")]
            restored = Payload(None, PLAIN, *payload) if payload else None
            self._pending.append(_Pending(number, worker, clock, restored, *parts))


def _average(contributions: list[Contribution], number: int) -> Contribution:
    """The mean by weight of a round's contributions, in the order given."""
    weights = np.array([part.weight for part in contributions], np.float64)
    shares = weights / weights.sum()
    staleness = max(part.staleness for part in contributions)
    keys = None
    if all(part.keys is not None for part in contributions):
        keys = np.unique(np.concatenate([part.keys for part in contributions]))
    values = None
    for part, share in zip(contributions, shares, strict=True):
        scaled = part.values * part.values.dtype.type(share)
        if keys is None and part.keys is None:
            values = scaled if values is None else values + scaled
            continue
        if values is None:
            values = np.zeros(len(keys), part.values.dtype)
        values[np.searchsorted(keys, part.keys)] += scaled
    return Contribution("", number, values, keys, 1.0, staleness)
