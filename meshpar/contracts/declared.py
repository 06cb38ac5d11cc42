"""One declared collective: a term of a contract."""

import dataclasses

from meshpar.contracts import cost


@dataclasses.dataclass(frozen=True)
class DeclaredCollective:
    """One declared collective.

    Attributes:
      kind: as `Collective.kind`; "any" for a bound over all kinds.
      axes: mesh axes over which it runs, outer to inner.
      group_size: devices that take part together.
      count: executions per step; 0 if only the bytes are bounded. A compiler may
        combine executions but not add any.
      payload_bytes: bytes of the whole tensors on one device, over all executions.
      why: purpose, for reports and messages.
      bound: whether `payload_bytes` is an upper bound on the bytes sent instead of
        exact; used for axes that the compiler handles.
      gathers: whether it gathers tensors, by any kind of collective. A compiler may
        drop it where nothing reads them or all rounds gather the same.
      partial: whether its groups are only parts of the devices along `axes`.
      beside: the pass over the layers whose compute stands beside it, such as
        "forward"; "" if none does.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    count: int
    payload_bytes: int
    why: str
    bound: bool = False
    gathers: bool = False
    partial: bool = False
    beside: str = ""

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends per step; at most, for a bound."""
        if self.kind == "any":
            return float(self.payload_bytes)
        return cost.wire_bytes(self.kind, self.payload_bytes, self.group_size)

    def seconds(self, link: cost.Link) -> float:
        """Seconds per step if nothing runs beside it; at most, for a bound."""
        if self.kind == "any":
            return self.payload_bytes / link.bandwidth
        size = self.payload_bytes
        return cost.seconds(self.kind, size, self.group_size, link, self.count)
