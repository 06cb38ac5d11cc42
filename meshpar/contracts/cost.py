"""Cost formulas of collectives: bytes on the wire, and steps that wait for each other.

`n` devices take part. A payload is the whole tensor on one device: the operand of a
reduction, the result of an all_gather. Wire bytes are those that one device sends (the
device that sends most).

Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication
  Operations in MPICH, IJHPCA 19(1), 2005.
"""

import math

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

_RING_STEPS = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "all_to_all": lambda n: n - 1,
    "permute": lambda n: 1,
    "broadcast": lambda n: n - 1,
}


def wire_bytes(kind: str, payload_bytes: float, n: int) -> float:
    """Bytes that one device sends for one collective in its bandwidth-optimal form.

    Args:
      kind: all_reduce, all_gather, reduce_scatter, all_to_all, permute or broadcast.
      payload_bytes: bytes of the whole tensor on one device.
      n: number of devices that take part.
    """
    return _WIRE[kind](n) * payload_bytes if n > 1 else 0.0


def steps(kind: str, n: int, form: str = "ring") -> int:
    """Number of messages that must wait for each other.

    Args:
      kind: as for `wire_bytes`.
      n: number of devices that take part.
      form: "ring", or "tree" for broadcast and all_reduce.

    Raises:
      ValueError: the kind does not have this form.
    """
    if n == 1:
        return 0
    if form == "ring":
        return _RING_STEPS[kind](n)
    if form != "tree" or kind not in ("broadcast", "all_reduce"):
        raise ValueError(f"{kind} has no {form!r} form; use 'ring'")
    rounds = math.ceil(math.log2(n))
    return 2 * rounds if kind == "all_reduce" else rounds
