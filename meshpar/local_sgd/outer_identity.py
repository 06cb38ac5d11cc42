"""The identity of an outer optimizer: a hash of the operations of its update.

An optimizer is a pair of functions, whose settings are hidden in them. They appear in
the operations of a traced update. Two optimizers of equal state, such as SGD with two
learning rates, differ there.
"""

import hashlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar.jaxprs.walk import CALLS, Interpreter


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
        results = operations.evaluate(trace, inputs)
        digest.update("\n".join([*operations.lines, str(results)]).encode())
    return digest.hexdigest()[:16]


class _Operations(Interpreter[str]):
    """The operations of a trace as lines, with values numbered as they appear."""

    def __init__(self):
        self.lines: list[str] = []
        self._numbers = itertools.count()

    def new_name(self) -> str:
        return f"v{next(self._numbers)}"

    def constant(self, value: Any) -> str:
        array = np.asarray(value)
        return f"{array.dtype}{array.tolist()}"

    def equation(self, eqn: Any, operands: list[str]) -> list[str]:
        """Adds a line for an operation; returns the names of its results."""
        if eqn.primitive.name in CALLS:
            return self.call(eqn, operands)
        results = [self.new_name() for _ in eqn.outvars]
        operation = f"{eqn.primitive.name} {operands} {_settings(eqn.params)}"
        self.lines.append(f"{results} = {operation}")
        return results


def _settings(params: dict[str, Any]) -> str:
    """The parameters of an operation that are plain values, such as an exponent."""
    plain = (bool, int, float, str, tuple)
    return str(sorted((k, v) for k, v in params.items() if isinstance(v, plain)))
