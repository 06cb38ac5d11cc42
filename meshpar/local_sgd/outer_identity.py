"""The identity of an outer optimizer: what its update computes, with all constants.

An optimizer is a pair of functions, whose settings are hidden in them. They appear in
the operations of a traced update. Two optimizers of equal state, such as SGD with two
learning rates, differ there.
"""

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar import compat


def outer_identity(outer: optax.GradientTransformation) -> str:
    """A hash of the operations of `outer`, equal in every process and start.

    Args:
      outer: an elementwise optimizer.
    """
    piece = jax.ShapeDtypeStruct((2,), jnp.float32)
    state = jax.eval_shape(outer.init, piece)
    traces = (
        jax.make_jaxpr(outer.init)(piece),
        jax.make_jaxpr(outer.update)(piece, state, piece),
    )
    digest = hashlib.sha256()
    for trace in traces:
        operations = _Operations()
        inputs = [operations.new_name() for _ in trace.jaxpr.invars]
        results = operations.add(trace.jaxpr, trace.consts, inputs)
        digest.update("\n".join([*operations.lines, str(results)]).encode())
    return digest.hexdigest()[:16]


class _Operations:
    """The operations of a trace as lines, with values numbered as they appear."""

    def __init__(self):
        self.lines: list[str] = []
        self._numbers = itertools.count()

    def new_name(self) -> str:
        return f"v{next(self._numbers)}"

    def add(
        self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[str]
    ) -> list[str]:
        """Adds a line for each operation; returns the names of the results."""
        arguments = [*map(_constant, consts), *inputs]
        names = dict(zip((*jaxpr.constvars, *jaxpr.invars), arguments, strict=True))

        def name(value: Any) -> str:
            return _constant(value.val) if hasattr(value, "val") else names[value]

        for eqn in jaxpr.eqns:
            operands = [name(value) for value in eqn.invars]
            if eqn.primitive.name in compat.CALLS:
                results = self.add(*compat.called_jaxpr(eqn), operands)
            else:
                results = [self.new_name() for _ in eqn.outvars]
                operation = f"{eqn.primitive.name} {operands} {_settings(eqn.params)}"
                self.lines.append(f"{results} = {operation}")
            names |= zip(eqn.outvars, results, strict=True)
        return [name(value) for value in jaxpr.outvars]


def _constant(value: Any) -> str:
    array = np.asarray(value)
    return f"{array.dtype}{array.tolist()}"


def _settings(params: dict[str, Any]) -> str:
    """The parameters of an operation that are plain values, such as an exponent."""
    plain = (bool, int, float, str, tuple)
    return str(sorted((k, v) for k, v in params.items() if isinstance(v, plain)))
