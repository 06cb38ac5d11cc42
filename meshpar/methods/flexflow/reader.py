"""Reads the operator graph of a function from its jaxpr, with all inner jaxprs inline.

Calls and rematerialized parts stand where they run, the body of a scan stands once and
counts every round, and of a conditional's branches the one with the most FLOPs.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.arrays import num_bytes
from meshpar.compat import scan_counts
from meshpar.jaxprs.flops import equation_flops
from meshpar.jaxprs.walk import CALLS, Interpreter, equations
from meshpar.methods.flexflow.dims import WHOLE, DimRule, dim_rule, paired
from meshpar.methods.flexflow.graph import (
    CARRY,
    ROW,
    STACK,
    Graph,
    Operator,
    Tensor,
)

_INLINED = CALLS | {"shard_map"}


class _Reader(Interpreter[int]):
    """Numbers values and operators in the order in which they run.

    Attributes:
      tensors: the values.
      operators: the operators.
      loops: (first, last) operator of each loop.
      times: executions per step of the equations that are read.
    """

    def __init__(self):
        self.tensors: list[Tensor] = []
        self.operators: list[Operator] = []
        self.loops: list[tuple[int, int]] = []
        self.times = 1

    def tensor(self, aval: Any, times: int = 1) -> int:
        """The number of a new tensor."""
        size = num_bytes(aval) if hasattr(aval, "shape") else 0
        shape = tuple(getattr(aval, "shape", ()))
        self.tensors.append(Tensor(shape, size, times))
        return len(self.tensors) - 1

    def constant(self, value: Any) -> int:
        """The number of a constant."""
        return self.tensor(jax.typeof(value))

    def literal(self, atom: Any, owner: Any, place: int) -> int:
        """The number of a literal."""
        return self.tensor(atom.aval)

    def equation(self, eqn: Any, operands: list[int]) -> list[int]:
        """Adds one equation; tensors of its results."""
        kind = eqn.primitive.name
        if kind == "scan":
            return self.scan(eqn, operands)
        if kind == "while":
            return self.loop(eqn, operands)
        if kind == "cond":
            heaviest = max(eqn.params["branches"], key=_flops)
            return self.evaluate(heaviest, operands[1:])
        if kind in _INLINED:
            return self.call(eqn, operands)
        return self.operator(eqn, operands, kind, dim_rule(eqn))

    def operator(
        self, eqn: Any, operands: list[int], kind: str, rule: DimRule
    ) -> list[int]:
        """Adds an operator."""
        results = [self.tensor(var.aval, self.times) for var in eqn.outvars]
        flops, target = equation_flops(eqn), None
        if kind == "sharding_constraint":
            target = _target(eqn.params["sharding"], len(eqn.outvars[0].aval.shape))
        self._add(kind, operands, results, rule, flops, self.times, target)
        return results

    def _add(
        self,
        kind: str,
        operands: Sequence[int],
        results: Sequence[int],
        rule: DimRule,
        flops: float,
        times: int,
        target: tuple | None = None,
    ) -> None:
        op = Operator(
            *(kind, tuple(operands), tuple(results), rule, flops, times, target, None)
        )
        self.operators.append(op)

    def scan(self, eqn: Any, operands: list[int]) -> list[int]:
        """Adds the body of a scan once, and operators that cut and fill its stacks."""
        num_consts, num_carry = scan_counts(eqn)
        body, times = eqn.params["jaxpr"], self.times
        rounds = times * eqn.params["length"]
        first = num_consts + num_carry
        start, inputs = len(self.operators), operands[:first]
        if num_carry:
            inputs[num_consts:] = self._carry(inputs[num_consts:], rounds)
        for aval, stack in zip(body.in_avals[first:], operands[first:], strict=True):
            row = self.tensor(aval, rounds)
            dims = tuple(range(len(aval.shape)))
            rule = _shifted(((WHOLE, *dims),), (dims,), aval.shape)
            self._add(ROW, [stack], [row], rule, 0.0, rounds)
            inputs.append(row)
        self.times = rounds
        made = self.evaluate(body, inputs)
        self.times = times
        results = made[:num_carry]
        if num_carry:
            carry = dataclasses.replace(self.operators[start], back=tuple(results))
            self.operators[start] = carry
        for var, row in zip(eqn.outvars[num_carry:], made[num_carry:], strict=True):
            stack = self.tensor(var.aval)
            shape = var.aval.shape[1:]
            dims = tuple(range(len(shape)))
            rule = _shifted((dims,), ((WHOLE, *dims),), shape)
            self._add(STACK, [row], [stack], rule, 0.0, rounds)
            results.append(stack)
        self.loops.append((start, len(self.operators) - 1))
        return results

    def _carry(self, values: list[int], rounds: int) -> list[int]:
        """Adds the carry of a scan: the values with which each round starts."""
        shapes = [self.tensors[value].shape for value in values]
        rule = paired(shapes)
        results = []
        for value, shape in zip(values, shapes, strict=True):
            self.tensors.append(Tensor(shape, self.tensors[value].size, rounds))
            results.append(len(self.tensors) - 1)
        self._add(CARRY, values, results, rule, 0.0, 1)
        return results

    def loop(self, eqn: Any, operands: list[int]) -> list[int]:
        """Adds the body of a while loop once: nothing says how often it runs."""
        start, skipped = len(self.operators), eqn.params["cond_nconsts"]
        results = self.evaluate(eqn.params["body_jaxpr"], operands[skipped:])
        self.loops.append((start, len(self.operators) - 1))
        return results

    def finished(self) -> tuple[Operator, ...]:
        """The operators, each with the outermost loop around it."""
        done = list(self.operators)
        for start, end in self.loops:  # Inner loops come first.
            for index in range(start, end + 1):
                done[index] = dataclasses.replace(done[index], loop=(start, end))
        return tuple(done)


def _shifted(operands: tuple, results: tuple, shape: tuple[int, ...]) -> DimRule:
    return DimRule(operands, results, dict(enumerate(shape)))


def _flops(jaxpr: Any) -> float:
    """FLOPs of the matmuls of a closed jaxpr, once."""
    return sum(map(equation_flops, equations(jaxpr.jaxpr)))


def _target(sharding: Any, rank: int) -> tuple[tuple[str, ...] | None, ...]:
    """Names per dim of a constraint; None where it leaves a dim open."""
    if not isinstance(sharding, NamedSharding):
        return (None,) * rank
    entries = []
    for entry in (*sharding.spec, *(None,) * (rank - len(sharding.spec))):
        if entry is PartitionSpec.UNCONSTRAINED:
            entries.append(None)
        elif isinstance(entry, str):
            entries.append((entry,))
        else:
            entries.append(tuple(entry or ()))
    return tuple(entries)


def read_graph(
    jaxpr: jax.extend.core.ClosedJaxpr,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
) -> Graph:
    """The graph of a function that was traced once.

    Args:
      jaxpr: of the function.
      inputs: numbers of its inputs: "params" as {path: number}, and "batch" as a list.
      outputs: numbers of its outputs: "gradients" as {path: number}, and "loss" as a
        number; both may be left out.
    """
    reader = _Reader()
    arguments = list(map(reader.tensor, jaxpr.in_avals))
    made = reader.evaluate(jaxpr, arguments)
    loss = outputs.get("loss")
    graph = Graph(
        tensors=tuple(reader.tensors),
        operators=reader.finished(),
        params={path: arguments[n] for path, n in inputs["params"].items()},
        batch=tuple(arguments[n] for n in inputs["batch"]),
        loss=None if loss is None else made[loss],
        gradients={p: made[n] for p, n in outputs.get("gradients", {}).items()},
        outputs=frozenset(made),
    )
    return _without_dead_operators(graph)


def _without_dead_operators(graph: Graph) -> Graph:
    """The graph without operators on which no output depends."""
    needed, kept = set(graph.outputs), set()
    needed.update(tensor for op in graph.operators for tensor in op.back)
    for index in reversed(range(len(graph.operators))):
        op = graph.operators[index]
        if needed.intersection(op.results):
            kept.add(index)
            needed.update(op.operands)
    order = sorted(kept)
    places = {old: new for new, old in enumerate(order)}

    def moved(loop: tuple[int, int] | None) -> tuple[int, int] | None:
        inside = [places[i] for i in range(loop[0], loop[1] + 1) if i in kept]
        return inside[0], inside[-1]

    operators = tuple(
        dataclasses.replace(op, loop=moved(op.loop)) if op.loop else op
        for op in (graph.operators[i] for i in order)
    )
    return dataclasses.replace(graph, operators=operators)
