"""The operator graph of a training step: operators, and the tensors between them.

It is read from the jaxpr of the loss and its gradients, so that forward and backward
operators, rematerialized ones and the gradient of each parameter are operators alike.

Source: Jia et al., arXiv:1807.05358, section 3 (operator graphs).
"""

import dataclasses
import functools
from collections.abc import Iterator

from meshpar.methods.flexflow.dims import ELEMENTWISE, DimRule

ROW = "scan_row"
"""Operator that takes the row of one round from a stack of a scan."""

CARRY = "scan_carry"
"""Operator that starts the rounds of a scan with the values that they pass on."""

STACK = "scan_stack"
"""Operator that puts the row of one round into a stack of a scan."""

VIEWS = frozenset(
    "broadcast_in_dim convert_element_type copy iota name reshape squeeze "
    "stop_gradient transpose".split()
)
"""Primitives whose results compilers do not store: their readers read the operand."""

_EXPENSIVE = frozenset(
    "acos asin atan cos div erf erf_inv exp expm1 log log1p logistic pow random_bits "
    "rsqrt sin sqrt tan tanh threefry2x32".split()
)
"""Elementwise primitives whose results are stored rather than computed twice."""

_FUSED_READERS = (
    ELEMENTWISE
    | VIEWS
    | frozenset(
        "reduce_sum reduce_max reduce_min reduce_and reduce_or argmax argmin pad slice "
        "select_n concatenate".split()
    )
)
"""Primitives that take elementwise operands as they are computed."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One value of a step, whole.

    Attributes:
      shape: its dims.
      size: bytes.
      times: how often it is made in a step; more than once in loops.
    """

    shape: tuple[int, ...]
    size: int
    times: int


@dataclasses.dataclass(frozen=True)
class Operator:
    """One operation of a step.

    Attributes:
      name: primitive of jax.
      operands: tensors that it reads.
      results: tensors that it makes.
      rule: how their dims correspond.
      flops: of one execution, on whole tensors; 0 but for matmuls and convolutions.
      times: executions in a step.
      target: names of dims, or of axes, that a constraint asks for; an entry is None
        where it leaves a dim open. None for all other operators.
      loop: (first, last) operator of the outermost loop around it, or None.
      back: of a `CARRY`, what a round ends with, and the next one starts with.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: DimRule
    flops: float
    times: int
    target: tuple[tuple[str, ...] | None, ...] | None
    loop: tuple[int, int] | None
    back: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Graph:
    """The operators of a step in the order in which they run.

    Attributes:
      tensors: all values.
      operators: all operations.
      params: {path: tensor} of the weights.
      batch: tensors of the batch's leaves.
      loss: tensor of the loss; None if the function is none.
      gradients: {path: tensor} of the gradients.
      outputs: all tensors that the step returns.
    """

    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    params: dict[str, int]
    batch: tuple[int, ...]
    loss: int | None
    gradients: dict[str, int]
    outputs: frozenset[int]

    @property
    def flops(self) -> float:
        """FLOPs of all matmuls and convolutions of a step."""
        return sum(op.flops * op.times for op in self.operators)

    @functools.cached_property
    def readers(self) -> dict[int, list[int]]:
        """{tensor: operators that read it}."""
        found: dict[int, list[int]] = {}
        for index, op in enumerate(self.operators):
            for tensor in dict.fromkeys(op.operands):
                found.setdefault(tensor, []).append(index)
        return found

    @functools.cached_property
    def makers(self) -> dict[int, int]:
        """{tensor: operator that makes it}."""
        made = enumerate(self.operators)
        return {tensor: index for index, op in made for tensor in op.results}

    @functools.cached_property
    def users(self) -> dict[str, tuple[int, ...]]:
        """{path: matmuls and convolutions that read a parameter, or a view of it}."""
        return {path: tuple(self._users(t)) for path, t in self.params.items()}

    def _users(self, tensor: int) -> Iterator[int]:
        for index in self.readers.get(tensor, ()):
            op = self.operators[index]
            if op.flops:
                yield index
            elif op.name in VIEWS or op.name == ROW:
                for result in op.results:
                    yield from self._users(result)

    @functools.cached_property
    def paths_of(self) -> dict[int, list[str]]:
        """{tensor: paths of the parameters whose gradient it is}."""
        found: dict[int, list[str]] = {}
        for path, tensor in self.gradients.items():
            found.setdefault(tensor, []).append(path)
        return found

    @functools.cached_property
    def gradient_makers(self) -> dict[str, tuple[int, tuple[int | None, ...]]]:
        """{path: operator that makes a gradient, and its dims in its first result}.

        Views between the operator and the gradient are followed; a dim is None where
        they mix it with others.
        """
        found = {}
        for path, tensor in self.gradients.items():
            dims: list[int | None] = list(range(len(self.tensors[tensor].shape)))
            while (index := self.makers.get(tensor)) is not None:
                op = self.operators[index]
                if op.name not in VIEWS or len(op.operands) != 1:
                    found[path] = index, tuple(dims)
                    break
                (before,), (after,) = op.rule.operands, op.rule.results
                named = dict(zip(after, dims, strict=True))
                dims = [named.get(factor) if factor >= 0 else None for factor in before]
                (tensor,) = op.operands
        return found

    @functools.cached_property
    def rows(self) -> frozenset[int]:
        """Tensors that lie in memory as a part of another one."""
        made = (op.results for op in self.operators if op.name in (ROW, CARRY))
        return frozenset(tensor for results in made for tensor in results)

    @functools.cached_property
    def stored(self) -> frozenset[int]:
        """Tensors that lie in memory; all others are computed by what reads them.

        A rough model of a compiler's fusion: elementwise results are stored if a
        matmul or the like reads them, or if they are expensive and read twice.
        """
        stored = {t for t in range(len(self.tensors)) if t not in self.makers}
        for op in self.operators:
            fuses = op.name in VIEWS or op.name in ELEMENTWISE
            for tensor in op.results:
                if not fuses or (op.name not in VIEWS and self._is_kept(tensor, op)):
                    stored.add(tensor)
        return frozenset(stored | self.outputs | self.rows)

    def _is_kept(self, tensor: int, op: Operator) -> bool:
        readers = list(self._final_readers(tensor))
        if any(name not in _FUSED_READERS for name in readers):
            return True
        return op.name in _EXPENSIVE and len(readers) > 1

    def _final_readers(self, tensor: int) -> Iterator[str]:
        """Names of the operators that read a tensor or a view of it."""
        for index in self.readers.get(tensor, ()):
            op = self.operators[index]
            if op.name in VIEWS and op.name != "broadcast_in_dim":
                for result in op.results:
                    yield from self._final_readers(result)
            else:
                yield op.name

    @functools.cached_property
    def sources(self) -> tuple[frozenset[int], ...]:
        """The stored tensors from which readers compute each tensor."""
        found: list[frozenset[int]] = [frozenset()] * len(self.tensors)
        for tensor in self.stored:
            found[tensor] = frozenset((tensor,))
        for op in self.operators:
            below = frozenset().union(*(found[t] for t in op.operands))
            for tensor in op.results:
                if tensor not in self.stored:
                    found[tensor] = below
        return tuple(found)

    @functools.cached_property
    def read_bytes(self) -> tuple[int, ...]:
        """Bytes that an operator reads for each tensor."""
        return tuple(
            sum(self.tensors[t].size for t in sources) for sources in self.sources
        )

    @functools.cached_property
    def last_reads(self) -> dict[int, int]:
        """{stored tensor: last operator that reads it, or something computed from it}.

        A loop reads until its end what was made before it.
        """
        last: dict[int, int] = {}
        for index, op in enumerate(self.operators):
            for tensor in op.operands:
                for source in self.sources[tensor]:
                    end = index
                    if op.loop and self.makers.get(source, -1) < op.loop[0]:
                        end = op.loop[1]
                    last[source] = max(last.get(source, 0), end)
        end = len(self.operators)
        return last | {tensor: end for tensor in self.outputs}

    @functools.cached_property
    def boundary(self) -> int:
        """The operator that makes the loss; the backward pass follows."""
        return self.makers.get(self.loss, len(self.operators) - 1)
