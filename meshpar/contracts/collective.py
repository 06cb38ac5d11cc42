"""One collective instruction of a compiled program."""

import dataclasses

from meshpar.contracts import cost


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program.

    Attributes:
      kind: all_reduce, all_gather, reduce_scatter, all_to_all, permute or broadcast.
      axes: mesh axes over which it runs, outer to inner; () where no set of axes gives
        its groups.
      group_size: devices that take part together.
      payload_bytes: bytes of the whole tensor on one device: the operand, or the result
        of an all_gather.
      executions: how often it runs per call of the program.
      asynchronous: whether it starts and ends in different places.
      overlapped: whether compute is scheduled between its start and its end.
      computation: the computation in which it stands.
      source: "file:line" that asked for it; "" where the compiler made it up.
      conditional: whether it stands under a conditional.
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

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends per call of the program, all executions."""
        one = cost.wire_bytes(self.kind, self.payload_bytes, self.group_size)
        return one * self.executions
