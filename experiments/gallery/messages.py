"""Communication patterns as messages, which are sent one round after another."""

import collections
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np

Message = tuple[int, int, list[Hashable]]
"""(sender, receiver, names of the parts that it carries)."""

Rounds = Iterator[list[Message]]
"""Messages that are sent at the same time, round by round."""


def links(topology: str, n: int) -> set[tuple[int, int]]:
    """Pairs of devices that a link connects, both ways."""
    pairs = {
        "ring": [(i, (i + 1) % n) for i in range(n)],
        "tree": [(i, i & (i - 1)) for i in range(1, n)],
        "star": [(0, i) for i in range(1, n)],
        "full": [(i, j) for i in range(n) for j in range(i)],
    }[topology]
    return {*pairs, *((j, i) for i, j in pairs)}


def longest_way(topology: str, n: int) -> list[int]:
    """Devices on the shortest way between the two that are farthest apart."""
    found, known = [0], links(topology, n)
    for start in range(n):
        ways, waiting = {start: [start]}, collections.deque([start])
        while waiting:
            here = waiting.popleft()
            for other in range(n):
                if (here, other) in known and other not in ways:
                    ways[other] = [*ways[here], other]
                    waiting.append(other)
        found = max(found, *ways.values(), key=len)
    return found


def _halves(n: int, whole: bool) -> Rounds:
    """From the root down a binomial tree: all parts, or those of the receiver."""
    stride = n // 2
    while stride:
        yield [
            (
                i,
                i + stride,
                list(range(n) if whole else range(i + stride, i + 2 * stride)),
            )
            for i in range(0, n, 2 * stride)
        ]
        stride //= 2


def _from_root(pattern: str, topology: str, n: int) -> Rounds:
    """Broadcast and scatter."""
    whole = pattern == "broadcast"
    if topology in ("tree", "full"):
        yield from _halves(n, whole)
    elif topology == "star":
        for i in range(1, n):
            yield [(0, i, list(range(n)) if whole else [i])]
    elif whole:
        for i in range(n - 1):
            yield [(i, i + 1, list(range(n)))]
    else:  # The part that goes farthest leaves first, and nobody waits.
        for step in range(1, n):
            yield [
                (d - n + step, d - n + step + 1, [d])
                for d in range(n - step, n)
                if d - n + step < d
            ]


def _to_all(topology: str, n: int) -> Rounds:
    """Parts of all devices go to all devices."""
    if topology == "ring":
        for step in range(n - 1):
            yield [(i, (i + 1) % n, [(i - step) % n]) for i in range(n)]
    elif topology == "full":
        stride = 1
        while stride < n:
            own = {i: i // stride * stride for i in range(n)}
            yield [
                (i, i ^ stride, list(range(own[i], own[i] + stride))) for i in range(n)
            ]
            stride *= 2
    else:
        yield from _reversed(_from_root("scatter", topology, n))
        yield from _from_root("broadcast", topology, n)


def _exchange(topology: str, n: int) -> Rounds:
    """Every device has a part for every other one: parts are (sender, receiver)."""
    if topology == "ring":
        for step in range(1, n):  # What came from device `of` and goes further.
            yield [
                (i, (i + 1) % n, [(of, (of + t) % n) for t in range(step, n)])
                for i in range(n)
                for of in [(i - step + 1) % n]
            ]
    elif topology == "full":
        for step in range(1, n):
            yield [(i, (i + step) % n, [(i, (i + step) % n)]) for i in range(n)]
    elif topology == "star":
        for i in range(1, n):
            yield [(i, 0, [(i, to) for to in range(n) if to != i])]
        for i in range(1, n):
            yield [(0, i, [(of, i) for of in range(n) if of != i])]
    else:
        for up in _reversed(_halves(n, whole=False)):
            yield [(i, j, [(of, to) for of in p for to in range(n)]) for i, j, p in up]
        for down in _halves(n, whole=False):
            yield [
                (i, j, [(of, to) for to in p for of in range(n)]) for i, j, p in down
            ]


def _reversed(rounds: Rounds) -> Rounds:
    """Rounds in reverse: receivers send back, those of the last round first."""
    for messages in reversed(list(rounds)):
        yield [(receiver, sender, parts) for sender, receiver, parts in messages]


def rounds_of(pattern: str, topology: str, n: int) -> Iterator[tuple[bool, list]]:
    """(whether parts are added to those that are there, messages) of every round."""
    sums = {
        "reduce": lambda: _reversed(_from_root("broadcast", topology, n)),
        "reduce_scatter": lambda: (
            _reversed(_to_all(topology, n))
            if topology in ("ring", "full")
            else _chain(
                _reversed(_from_root("broadcast", topology, n)),
                _from_root("scatter", topology, n),
            )
        ),
    }
    if pattern == "all_reduce":
        parts = topology in ("ring", "full")
        first, then = (
            ("reduce_scatter", "all_gather") if parts else ("reduce", "broadcast")
        )
        yield from rounds_of(first, topology, n)
        yield from rounds_of(then, topology, n)
    elif pattern in sums:
        is_scattered = pattern == "reduce_scatter" and topology in ("tree", "star")
        found = list(sums[pattern]())
        for number, messages in enumerate(found):
            yield not (is_scattered and number >= len(found) // 2), messages
    else:
        plain = {
            "broadcast": lambda: _from_root("broadcast", topology, n),
            "scatter": lambda: _from_root("scatter", topology, n),
            "gather": lambda: _reversed(_from_root("scatter", topology, n)),
            "all_gather": lambda: _to_all(topology, n),
            "all_to_all": lambda: _exchange(topology, n),
        }
        for messages in plain[pattern]():
            yield False, messages


def _chain(*all_rounds: Rounds) -> Rounds:
    for rounds in all_rounds:
        yield from rounds


def _start_and_end(pattern: str, n: int) -> tuple[list[dict], list[dict]]:
    """({part: number} of every device before, and what it needs at the end)."""
    x = np.random.default_rng(0).integers(1, 99, (n, n)).tolist()
    whole, total = dict(enumerate(x[0])), dict(enumerate(np.sum(x, 0).tolist()))
    own = [{i: whole[i]} for i in range(n)]
    summed = [{i: total[i]} for i in range(n)]
    nothing = [{} for _ in range(n - 1)]
    addends = [dict(enumerate(row)) for row in x]
    return {
        "broadcast": ([whole, *nothing], [whole] * n),
        "scatter": ([whole, *nothing], own),
        "gather": (own, [whole, *nothing]),
        "all_gather": (own, [whole] * n),
        "reduce": (addends, [total, *nothing]),
        "reduce_scatter": (addends, summed),
        "all_reduce": (addends, [total] * n),
        "all_to_all": (
            [{(i, to): x[i][to] for to in range(n)} for i in range(n)],
            [{(of, i): x[of][i] for of in range(n)} for i in range(n)],
        ),
    }[pattern]


def simulate(pattern: str, topology: str, n: int) -> tuple[int, float]:
    """(messages, payloads) of a pattern, sent message by message.

    A payload is n parts. A round lasts as long as its largest message.

    Raises:
      ValueError: a message without a link, two of one device at once, a part that is
        not there, or another end than the pattern's.
    """
    if pattern == "send":
        hops = len(longest_way(topology, n)) - 1
        return hops, float(hops)
    if pattern == "barrier":  # Sums of nothing: every device has heard of all others.
        return simulate("all_reduce", topology, n)[0], 0.0
    start, end = _start_and_end(pattern, n)
    held: list[dict[Any, int]] = [dict(one) for one in start]
    known, count, carried = links(topology, n), 0, 0
    for adds, messages in rounds_of(pattern, topology, n):
        senders, receivers, _ = zip(*messages, strict=True)
        if len({*senders}) < len(senders) or len({*receivers}) < len(receivers):
            raise ValueError(f"{pattern} on a {topology}: two messages of one device")
        moved = [(j, {p: held[i][p] for p in parts}) for i, j, parts in messages]
        if not {*zip(senders, receivers, strict=True)} <= known:
            raise ValueError(f"{pattern} on a {topology}: there is no such link")
        for j, parts in moved:
            before = held[j] if adds else {}
            held[j] |= {p: x + before.get(p, 0) for p, x in parts.items()}
        count += 1
        carried += max(len(parts) for _, parts in moved)
    for device, needed in zip(held, end, strict=True):
        if any(device.get(part) != x for part, x in needed.items()):
            raise ValueError(f"{pattern} on a {topology} ends with other numbers")
    return count, carried / n
