"""Costs of communication patterns by topology: ring, tree, star and full.

A message of m bytes takes latency + m / bandwidth over one link. A device sends at most
one message and receives at most one at a time, and stores what it passes on. A tensor
of one payload is the operand of a reduction, the result of a gather, the source of a
broadcast or a scatter, or what each device hands out in an all_to_all. The algorithms:

    ring  steps along the ring, one way; reductions and gathers part by part
    tree  up and down a binomial tree, whose root is device 0
    star  through the hub, device 0, one message after another
    full  recursive halving and doubling, and exchanges in pairs

Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication
  Operations in MPICH, IJHPCA 19(1), 2005; Hockney, The communication challenge for MPP,
  Parallel Computing 20(3), 1994 (latency and bandwidth).
"""

import dataclasses
from collections.abc import Callable

from meshpar.errors import MeshparError, nearest

RING, TREE, STAR, FULL = TOPOLOGIES = ("ring", "tree", "star", "full")
"""The topologies: which devices a link connects."""

PATTERNS = (
    *("send", "broadcast", "reduce", "all_reduce", "scatter", "gather"),
    *("all_gather", "reduce_scatter", "all_to_all", "barrier"),
)
"""The patterns, as in `meshpar.collectives`."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Messages that wait for each other.

    Attributes:
      messages: their number.
      payloads: what they carry in all, in payloads.
    """

    messages: float
    payloads: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.messages + other.messages, self.payloads + other.payloads)

    def seconds(self, num_bytes: float, latency: float, bandwidth: float) -> float:
        """Seconds of the pattern.

        Args:
          num_bytes: of one payload.
          latency: seconds of a message without bytes.
          bandwidth: bytes per second of a link.
        """
        return self.messages * latency + self.payloads * num_bytes / bandwidth


_Formula = Callable[[int, int], tuple[float, float]]
"""(devices, log2 of them) -> (messages, payloads)."""

_ON_RING: dict[str, _Formula] = {
    "send": lambda n, k: (n // 2, n // 2),
    "broadcast": lambda n, k: (n - 1, n - 1),
    "scatter": lambda n, k: (n - 1, (n - 1) / n),
    "all_gather": lambda n, k: (n - 1, (n - 1) / n),
    "all_to_all": lambda n, k: (n - 1, (n - 1) / 2),
}
_ON_TREE: dict[str, _Formula] = {
    "send": lambda n, k: (2 * k - 1, 2 * k - 1),
    "broadcast": lambda n, k: (k, k),
    "scatter": lambda n, k: (k, (n - 1) / n),
    "all_gather": lambda n, k: (2 * k, (n - 1) / n + k),
    "all_to_all": lambda n, k: (2 * k, 2 * (n - 1)),
}
_ON_STAR: dict[str, _Formula] = {
    "send": lambda n, k: (min(n - 1, 2),) * 2,
    "broadcast": lambda n, k: (n - 1, n - 1),
    "scatter": lambda n, k: (n - 1, (n - 1) / n),
    "all_gather": lambda n, k: (2 * (n - 1), (n - 1) / n + n - 1),
    "all_to_all": lambda n, k: (2 * (n - 1), 2 * (n - 1) ** 2 / n),
}
_ON_FULL: dict[str, _Formula] = {
    "send": lambda n, k: (1, 1),
    "broadcast": lambda n, k: (k, k),
    "scatter": lambda n, k: (k, (n - 1) / n),
    "all_gather": lambda n, k: (k, (n - 1) / n),
    "all_to_all": lambda n, k: (n - 1, (n - 1) / n),
}
_FORMULAS = {RING: _ON_RING, TREE: _ON_TREE, STAR: _ON_STAR, FULL: _ON_FULL}

_BACKWARD = {
    "reduce": "broadcast",
    "gather": "scatter",
    "reduce_scatter": "all_gather",
}
"""{pattern: that whose messages it sends in the reverse direction and order}."""


def cost(pattern: str, topology: str, n: int) -> Cost:
    """The messages of a pattern that wait for each other.

    `send` is that between the two devices that are farthest apart, and a `barrier` is
    an all_reduce without bytes.

    Args:
      pattern: one of `PATTERNS`.
      topology: one of `TOPOLOGIES`.
      n: number of devices; of a tree and a full graph a power of two.

    Raises:
      MeshparError: there is no such pattern, topology or number of devices.
    """
    for name, known in ((pattern, PATTERNS), (topology, TOPOLOGIES)):
        if name not in known:
            raise MeshparError(f"{name!r} is unknown; {nearest(name, known)}")
    halves = topology in (TREE, FULL)
    if n < 1 or (halves and n & (n - 1)):
        needed = "a power of two" if halves else "1 or more"
        raise MeshparError(f"a {topology} of n={n} devices: use {needed}")
    if n == 1:
        return Cost(0, 0)
    if pattern == "barrier":
        return Cost(cost("all_reduce", topology, n).messages, 0)
    if pattern == "all_reduce":
        parts = topology in (RING, FULL)
        ways = ("reduce_scatter", "all_gather") if parts else ("reduce", "broadcast")
        return cost(ways[0], topology, n) + cost(ways[1], topology, n)
    formula = _FORMULAS[topology][_BACKWARD.get(pattern, pattern)]
    return Cost(*formula(n, n.bit_length() - 1))


def fastest(
    pattern: str, n: int, num_bytes: float, latency: float, bandwidth: float
) -> str:
    """The topology on which a pattern takes the least time; of equals the first.

    Args:
      pattern: one of `PATTERNS`.
      n: number of devices, a power of two.
      num_bytes: of one payload.
      latency: seconds of a message without bytes.
      bandwidth: bytes per second of a link.
    """
    return min(
        TOPOLOGIES,
        key=lambda name: cost(pattern, name, n).seconds(num_bytes, latency, bandwidth),
    )


def crossing_bytes(n: int, latency: float, bandwidth: float) -> float:
    """Bytes from which on a ring sums faster than a tree; infinite if it never does.

    Args:
      n: number of devices, a power of two.
      latency: seconds of a message without bytes.
      bandwidth: bytes per second of a link.
    """
    ring, tree = (cost("all_reduce", name, n) for name in (RING, TREE))
    fewer = tree.payloads - ring.payloads
    if fewer <= 0:
        return float("inf")
    return max(0.0, ring.messages - tree.messages) * latency * bandwidth / fewer
