"""One collective instruction of a compiled program."""

import dataclasses

from meshpar.contracts import cost


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program.

    Attributes:
      kind: all_reduce, all_gather, reduce_scatter, all_to_all, permute or broadcast.
      axes: mesh axes over which it runs, outer to inner.
      group_size: devices that take part together.
      payload_bytes: bytes of the whole tensor on one device: the operand, or the result
        of an all_gather.
      executions: number of times that it runs per call of the program.
      asynchronous: whether its start and its end are separate instructions.
      overlapped: whether compute is scheduled between its start and its end.
      computation: name of the computation that contains it.
      source: "file:line" that asked for it; "" if the compiler added it.
      conditional: whether it is under a conditional.
      partial: whether its groups are only parts of the devices along `axes`.
      between_slices: whether it runs over the links between slices of TPUs.
      name: of the instruction in its computation.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    payload_bytes: int
    executions: int
    asynchronous: bool
    overlapped: bool
    computation: str
    source: str
    conditional: bool = False
    partial: bool = False
    between_slices: bool = False
    name: str = ""

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends per call of the program, over all executions."""
        sent = cost.wire_bytes(self.kind, self.payload_bytes, self.group_size)
        return sent * self.executions

    def seconds(self, link: cost.Link) -> float:
        """Seconds of all executions if nothing runs beside them."""
        size, runs = self.payload_bytes * self.executions, self.executions
        return cost.seconds(self.kind, size, self.group_size, link, runs)
