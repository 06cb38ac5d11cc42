"""Splits a backward pass in two: the input's gradient, then the weights' gradients.

Zero-bubble schedules run the second part (W) when a stage would be idle. The jaxpr is
split: equations that the gradient of the input needs belong to the first part (B), the
others to the second, and B hands over the values that W reads. Nothing is computed
twice, but for values that follow from no input. A loop inside a layer is not split.

Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshpar.arrays import Array
from meshpar.jaxprs.straight_line import (
    Atom,
    Slot,
    Step,
    StraightLine,
    dependents,
    evaluate,
    slots_of,
)


@dataclasses.dataclass(frozen=True, eq=False)
class SplitBackward:
    """The two parts of fn(weights, args) -> (gradient of the weights, rest).

    Attributes:
      program: the whole function, with calls written out.
      num_weights: number of inputs that are weights, which W may read again.
      first: steps of B.
      second: steps of W.
      handed_over: values that W reads and that B computes or has as inputs.
      gradients: results of W.
      rest: results of B.
      gradient_tree: structure of the gradient.
      rest_tree: structure of the rest.
    """

    program: StraightLine
    num_weights: int
    first: tuple[Step, ...]
    second: tuple[Step, ...]
    handed_over: tuple[Slot, ...]
    gradients: tuple[Atom, ...]
    rest: tuple[Atom, ...]
    gradient_tree: Any
    rest_tree: Any

    @classmethod
    def of(
        cls, fn: Callable[[Any, Any], tuple[Any, Any]], weights: Any, args: Any
    ) -> "SplitBackward":
        """Traces fn(weights, args) and splits it; only shapes matter."""
        flat_weights, weights_tree = jax.tree.flatten(weights)
        flat_args, args_tree = jax.tree.flatten(args)
        num_weights = len(flat_weights)

        def flat(*flat_inputs: Array) -> tuple[Any, Any]:
            return fn(
                jax.tree.unflatten(weights_tree, flat_inputs[:num_weights]),
                jax.tree.unflatten(args_tree, flat_inputs[num_weights:]),
            )

        trace = jax.make_jaxpr(flat, return_shape=True)
        closed, results = trace(*flat_weights, *flat_args)
        program = StraightLine.of(closed)
        gradient_tree, rest_tree = map(jax.tree.structure, results)
        count = gradient_tree.num_leaves
        gradients, rest = program.outputs[:count], program.outputs[count:]
        first = program.needed(rest)
        follow = dependents(program.steps, program.inputs)
        computed = [x for step in first for x in step.results if x in follow]
        second = program.needed(gradients, computed)
        available = {slot for step in second for slot in step.results}
        available |= {*program.inputs[:num_weights], *program.constants}
        reads = [*(x for step in second for x in step.operands), *gradients]
        handed_over = (slot for slot in slots_of(reads) if slot not in available)
        return cls(
            program,
            num_weights,
            first,
            second,
            tuple(dict.fromkeys(handed_over)),
            gradients,
            rest,
            gradient_tree,
            rest_tree,
        )

    def _start(self, weights: Any) -> dict[Slot, Array]:
        """{slot: value} of the constants and the weights."""
        inputs = self.program.inputs[: self.num_weights]
        leaves = jax.tree.leaves(weights)
        return {**self.program.constants, **dict(zip(inputs, leaves, strict=True))}

    def run_first(self, weights: Any, args: Any) -> tuple[Any, list[Array]]:
        """B: the rest of fn's results, and the arrays that W needs."""
        inputs = self.program.inputs[self.num_weights :]
        known = self._start(weights)
        known.update(zip(inputs, jax.tree.leaves(args), strict=True))
        values = evaluate(self.first, [*self.rest, *self.handed_over], known)
        count = len(self.rest)
        return jax.tree.unflatten(self.rest_tree, values[:count]), values[count:]

    def run_second(self, weights: Any, state: Sequence[Array]) -> Any:
        """W: the gradient of the weights."""
        known = self._start(weights) | dict(zip(self.handed_over, state, strict=True))
        gradients = evaluate(self.second, self.gradients, known)
        return jax.tree.unflatten(self.gradient_tree, gradients)
