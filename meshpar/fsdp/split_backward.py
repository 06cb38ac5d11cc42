"""Splits a backward pass in two: the gradient of the input, then that of the weights.

Zero-bubble schedules run the second part (W) when a stage would be idle. The jaxpr is
split: equations that the gradient of the input needs belong to the first part (B), the
others to the second, and B hands over the values that W reads. Nothing is computed
twice. A loop inside a layer is not split.

Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshpar import compat
from meshpar.arrays import Array
from meshpar.jaxprs.inlined import needed, read, variables, without_calls


@dataclasses.dataclass(frozen=True, eq=False)
class SplitBackward:
    """The two parts of fn(weights, args) -> (gradient of the weights, rest).

    Attributes:
      jaxpr: the whole function, with calls inlined.
      consts: its constants.
      num_weights: number of inputs that are weights, which W may read again.
      first: equations of B, by number.
      second: equations of W, by number.
      handed_over: variables that W reads and that B computes or has as inputs.
      gradients: output variables of W.
      rest: output variables of B.
      gradient_tree: structure of the gradient.
      rest_tree: structure of the rest.
    """

    jaxpr: Any
    consts: Sequence[Any]
    num_weights: int
    first: tuple[int, ...]
    second: tuple[int, ...]
    handed_over: tuple[Any, ...]
    gradients: tuple[Any, ...]
    rest: tuple[Any, ...]
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

        closed, results = without_calls(flat, (*flat_weights, *flat_args))
        jaxpr = closed.jaxpr
        gradient_tree, rest_tree = map(jax.tree.structure, results)
        count = gradient_tree.num_leaves
        gradients, rest = jaxpr.outvars[:count], jaxpr.outvars[count:]
        first = needed(jaxpr, rest)
        second = needed(jaxpr, gradients, frozenset(first))
        available = {v for i in second for v in jaxpr.eqns[i].outvars}
        available |= {*jaxpr.invars[:num_weights], *jaxpr.constvars}
        reads = [v for i in second for v in jaxpr.eqns[i].invars] + gradients
        handed_over = [v for v in variables(reads) if v not in available]
        return cls(
            jaxpr,
            closed.consts,
            num_weights,
            tuple(first),
            tuple(second),
            tuple(dict.fromkeys(handed_over)),
            tuple(gradients),
            tuple(rest),
            gradient_tree,
            rest_tree,
        )

    def _start(self, weights: Any) -> dict:
        """{variable: value} of the constants and the weights."""
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        weights = jax.tree.leaves(weights)
        inputs = self.jaxpr.invars[: self.num_weights]
        return env | dict(zip(inputs, weights, strict=True))

    def _run(self, env: dict, numbers: Sequence[int]) -> None:
        for number in numbers:
            eqn = self.jaxpr.eqns[number]
            outputs = compat.bind(eqn, [read(env, atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, outputs, strict=True))

    def run_first(self, weights: Any, args: Any) -> tuple[Any, list[Array]]:
        """B: the rest of fn's results, and the arrays that W needs."""
        env = self._start(weights)
        inputs = self.jaxpr.invars[self.num_weights :]
        env.update(zip(inputs, jax.tree.leaves(args), strict=True))
        self._run(env, self.first)
        rest = jax.tree.unflatten(self.rest_tree, [read(env, v) for v in self.rest])
        return rest, [env[v] for v in self.handed_over]

    def run_second(self, weights: Any, state: Sequence[Array]) -> Any:
        """W: the gradient of the weights."""
        env = self._start(weights) | dict(zip(self.handed_over, state, strict=True))
        self._run(env, self.second)
        gradients = [read(env, v) for v in self.gradients]
        return jax.tree.unflatten(self.gradient_tree, gradients)
