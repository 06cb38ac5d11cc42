"""Consistent-hash ring: which servers hold a range, in the order of its chain.

Every server has several points on the ring. A range belongs to the first server after
the hash of its name, and the next distinct servers hold its replicas. A server that
joins or leaves moves few ranges. No server heads more than 5/4 of the mean number of
ranges, which bounds the imbalance of few ranges.

Source: Karger et al., Consistent hashing, STOC 1997; Mirrokni et al., Consistent
  hashing with bounded loads, arXiv:1608.01350; Li et al., OSDI 2014, section 4.3.
"""

import bisect
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

_POINTS = 16
"""Points of every server on the ring."""


def _hash(text: str) -> int:
    """A hash that is the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def chains(
    ranges: Iterable[str], servers: Iterable[str], replicas: int
) -> Mapping[str, tuple[str, ...]]:
    """{range: its servers, the head first}.

    Args:
      ranges: names of the ranges.
      servers: names of the servers that are alive, at least one.
      replicas: servers per range; fewer if there are not so many servers.
    """
    servers, ranges = sorted(set(servers)), sorted(ranges)
    points = sorted((_hash(f"{s}#{i}"), s) for s in servers for i in range(_POINTS))
    most = -(-5 * len(ranges) // (4 * len(servers)))
    heads: Counter[str] = Counter()
    found = {}
    for name in ranges:
        at = bisect.bisect(points, (_hash(name), ""))
        order = list(dict.fromkeys(s for _, s in points[at:] + points[:at]))
        head = next(i for i, server in enumerate(order) if heads[server] < most)
        heads[order[head]] += 1
        found[name] = tuple((order[head:] + order[:head])[: min(replicas, len(order))])
    return found
