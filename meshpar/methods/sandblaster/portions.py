"""Portions: small parts of a batch that workers take one after the other (Sandblaster).

A worker that is free takes the next portion, so a slow worker takes fewer of them. Once
no portion is left, a free worker may start a backup copy of the portion that is
expected to take longest; the copy that ends first counts.

Time is simulated: a worker of speed v takes 1 / v seconds per unit of work.

Source: Dean et al., DistBelief, NeurIPS 2012, section 4.2; Dean, Ghemawat, MapReduce,
  OSDI 2004, section 3.6 (backup copies).
"""

import dataclasses
import heapq
import math
from collections.abc import Sequence

from meshpar.errors import MeshparError


@dataclasses.dataclass(frozen=True)
class Portions:
    """The workers, order and time of the portions of one batch.

    Attributes:
      seconds: from the start until the last portion is done.
      workers: the worker whose copy of each portion counts, in the order of portions.
      order: the portions in the order in which they were done.
      backups: copies that were started.
    """

    seconds: float
    workers: list[int]
    order: list[int]
    backups: int


def schedule(work: Sequence[float], speeds: Sequence[float], backup: bool) -> Portions:
    """Simulates one batch.

    Args:
      work: of each portion.
      speeds: of each worker, above 0.
      backup: whether free workers start copies once no portion is left.

    Raises:
      MeshparError: there is no worker, or one without a speed.
    """
    if not speeds or not all(0 < speed < math.inf for speed in speeds):
        raise MeshparError(f"speeds={list(speeds)}: use numbers above 0, at least one")
    owner: dict[int, int] = {}
    order: list[int] = []
    running: dict[int, list[float]] = {}
    # A free worker is an event as well: (time, worker, its portion or -1).
    events = [(0.0, worker, -1) for worker in range(len(speeds))]
    following, backups, now = 0, 0, 0.0
    while len(order) < len(work):
        now, worker, portion = heapq.heappop(events)
        if portion >= 0 and portion not in owner:
            owner[portion] = worker
            order.append(portion)
            del running[portion]
        if following < len(work):
            chosen, following = following, following + 1
        elif backup and (alone := [p for p, ends in running.items() if len(ends) < 2]):
            chosen = max(alone, key=lambda p: (running[p][0], -p))
            if now + work[chosen] / speeds[worker] >= running[chosen][0]:
                continue  # A copy would not be done earlier.
            backups += 1
        else:
            continue
        end = now + work[chosen] / speeds[worker]
        running.setdefault(chosen, []).append(end)
        heapq.heappush(events, (end, worker, chosen))
    return Portions(now, [owner[p] for p in range(len(work))], order, backups)
