"""Cost formulas of collectives: bytes on the wire, messages one by one, and seconds.

`n` devices take part. A payload is the whole tensor on one device: the operand of a
reduction, the result of an all_gather. Wire bytes are those that one device sends (the
device that sends most).

Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication
  Operations in MPICH, IJHPCA 19(1), 2005; Hockney, The communication challenge for MPP,
  Parallel Computing 20(3), 1994 (latency and bandwidth). Other topologies are in
  `meshpar.methods.pattern_costs`.
"""

import math
from typing import NamedTuple

_WIRE = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "permute": lambda n: 1.0,
    "broadcast": lambda n: 1.0,
}
KINDS = tuple(_WIRE)
"""The kinds of collectives."""


class Link(NamedTuple):
    """A link: a message takes latency + bytes / bandwidth.

    Attributes:
      bandwidth: bytes per second that a device sends.
      latency: seconds of a message without bytes.
      ways: 2 if a ring of such links carries parts both ways round at once, else 1.
    """

    bandwidth: float
    latency: float = 0.0
    ways: int = 1


def wire_bytes(kind: str, payload_bytes: float, n: int) -> float:
    """Bytes that one device sends for one collective in its bandwidth-optimal form.

    Args:
      kind: all_reduce, all_gather, reduce_scatter, all_to_all, permute or broadcast.
      payload_bytes: bytes of the whole tensor on one device.
      n: number of devices that take part.
    """
    return _WIRE[kind](n) * payload_bytes if n > 1 else 0.0


def steps(kind: str, n: int, form: str = "ring", ways: int = 1) -> int:
    """Number of messages that must wait for each other.

    Args:
      kind: as for `wire_bytes`.
      n: number of devices that take part.
      form: "ring", or "tree" for broadcast and all_reduce.
      ways: of a ring, as in `Link`.

    Raises:
      ValueError: the kind does not have this form.
    """
    if n == 1:
        return 0
    if form == "ring":
        round_ring = math.ceil((n - 1) / ways)
        return {"permute": 1, "all_reduce": 2 * round_ring}.get(kind, round_ring)
    if form != "tree" or kind not in ("broadcast", "all_reduce"):
        raise ValueError(f"{kind} has no {form!r} form; use 'ring'")
    rounds = math.ceil(math.log2(n))
    return 2 * rounds if kind == "all_reduce" else rounds


def seconds(
    kind: str, payload_bytes: float, n: int, link: Link, count: int = 1
) -> float:
    """Seconds of collectives that run one after another, and have the links alone.

    Args:
      kind: as for `wire_bytes`.
      payload_bytes: bytes of the whole tensors on one device, over all of them.
      n: number of devices that take part.
      link: which carries them round a ring.
      count: number of collectives.
    """
    waits = count * steps(kind, n, ways=link.ways) * link.latency
    return waits + wire_bytes(kind, payload_bytes, n) / link.bandwidth
