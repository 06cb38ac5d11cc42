"""`Region`: the operations of an optimizer's update that need whole matrices.

Muon orthogonalizes a matrix by products with itself, and every element of the result
depends on all others. A region holds the operations of one such part: from the values
that enter it, sharded as the training state is, to those that leave it. Whoever runs a
region gives each of its matrices whole to one device (`matrix_owners`).
"""

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

from meshpar.jaxprs.layer_values import Value
from meshpar.jaxprs.one_of_batch import MixesBatchError, OneOfBatch, Part
from meshpar.jaxprs.whole_matrices import matmul_flops
from meshpar.lowering.layer_update import Operation

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Region:
    """Operations that need whole matrices, of one tensor or stack.

    Attributes:
      operations: in order.
      entries: values that enter, an array for each matrix.
      common: values that enter and are the same for all matrices.
      exits: values that leave.
      sizes: {number: bytes} of one matrix of all values inside.
      key: equal for regions that do the same with matrices of the same form.
      batch: sizes of the first dims along which every tensor holds matrices, such as
        those of layers and experts; () if each is one matrix.
    """

    operations: tuple[Operation, ...]
    entries: tuple[Value, ...]
    common: tuple[Value, ...]
    exits: tuple[Value, ...]
    sizes: Mapping[int, int]
    key: Hashable
    batch: tuple[int, ...] = ()

    @property
    def reads(self) -> tuple[Value, ...]:
        """The values that a step reads."""
        return *self.entries, *self.common

    @property
    def makes(self) -> tuple[Value, ...]:
        """The values that a step makes."""
        return self.exits

    @property
    def flops(self) -> float:
        """FLOPs of the matmuls for one matrix."""
        own = (op.eqn for op in self.operations if op.eqn is not None)
        return sum(map(matmul_flops, own)) / math.prod(self.batch)

    @property
    def peak_bytes(self) -> int:
        """The most bytes of values for one matrix at a time."""
        last: dict[int, int] = {}
        for i, operation in enumerate(self.operations):
            last |= {x.number: i for x in operation.operands}
        last |= {x.number: len(self.operations) for x in self.exits}
        sizes = self.sizes
        held = {x.number: sizes[x.number] for x in self.entries}
        peak = sum(held.values())
        for i, operation in enumerate(self.operations):
            held |= {x.number: sizes[x.number] for x in operation.results}
            peak = max(peak, sum(held.values()))
            held = {n: size for n, size in held.items() if last.get(n, -1) > i}
        return peak // math.prod(self.batch)

    def run(self, entries: Sequence[Any], common: Sequence[Any]) -> list[Any]:
        """The exits of one matrix.

        Args:
          entries: arrays of one row.
          common: arrays.
        """
        if self.batch:
            return self._one_of_batch(entries, common)
        known = self._known(entries, common)
        for operation in self.operations:
            results = operation.run(*(known[x.number] for x in operation.operands))
            numbers = (x.number for x in operation.results)
            known |= zip(numbers, results, strict=True)
        return [known[x.number] for x in self.exits]

    def _known(self, entries: Sequence[T], common: Sequence[T]) -> dict[int, T]:
        given = (*self.entries, *self.common), (*entries, *common)
        return {x.number: value for x, value in zip(*given, strict=True)}

    def _one_of_batch(self, entries: Sequence[Any], common: Sequence[Any]) -> list[Any]:
        """`run` with a batch of one matrix."""
        span, run = len(self.batch), OneOfBatch()
        ones = [x.reshape(*(1,) * span, *x.shape) for x in entries]
        of_batch = [Part(x, 0, span=span) for x in ones]
        known = self._known(of_batch, list(map(Part, common)))
        for operation in self.operations:
            if operation.eqn is None:
                raise MixesBatchError("cond")
            operands = [known[x.number] for x in operation.operands]
            numbers = (x.number for x in operation.results)
            known |= zip(numbers, run.equation(operation.eqn, operands), strict=True)
        exits = [known[x.number] for x in self.exits]
        if any(x.place != (0, span) for x in exits):
            raise MixesBatchError("exits")
        return [x.array.reshape(x.array.shape[span:]) for x in exits]
