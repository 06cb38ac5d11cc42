"""Walks through jaxprs: the equations inside, and evaluation on values of any kind."""

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax.extend import core

T = TypeVar("T")

CALLS = frozenset(
    ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint")
    + ("custom_jvp_call", "custom_vjp_call")
)
"""Names of primitives that call one jaxpr with their own arguments."""


class Written(NamedTuple):
    """A function as its jaxpr, which runs without the function's own code.

    Attributes:
      jaxpr: closed, of the leaves of the arguments.
      result: the function's result, as a pytree of anything.
    """

    jaxpr: Any
    result: Any

    def __call__(self, *args: Any) -> Any:
        """The function's result, for arguments of the traced structure and shapes."""
        leaves = core.jaxpr_as_fun(self.jaxpr)(*jax.tree.leaves(args))
        return self.returned(leaves)

    def returned(self, leaves: Sequence[Any]) -> Any:
        """Leaves of a result in the structure of the function's."""
        return jax.tree.unflatten(jax.tree.structure(self.result), leaves)


def written(fn: Callable, *args: Any) -> Written:
    """Traces a function of pytrees of arrays, or of their shapes."""
    return Written(*jax.make_jaxpr(fn, return_shape=True)(*args))


def called_jaxpr(eqn: Any) -> Any:
    """The jaxpr that an equation of `CALLS` runs, open or closed."""
    kinds = (core.ClosedJaxpr, core.Jaxpr)
    return next(value for value in eqn.params.values() if isinstance(value, kinds))


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """(open jaxpr, its constants) of a jaxpr that is open or closed."""
    is_closed = isinstance(jaxpr, core.ClosedJaxpr)
    return (jaxpr.jaxpr, jaxpr.consts) if is_closed else (jaxpr, ())


def inner_jaxprs(eqn: Any) -> Sequence[Any]:
    """The open jaxprs that an equation runs."""
    return list(core.jaxprs_in_params(eqn.params))


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of those inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from equations(inner)


class Interpreter(abc.ABC, Generic[T]):
    """Evaluates jaxprs on values of another kind than arrays.

    A subclass gives `equation`, and `constant` or both `literal` and `constants`.
    """

    def constant(self, value: Any) -> T:
        """The value of a literal or a constant."""
        raise NotImplementedError

    @abc.abstractmethod
    def equation(self, eqn: Any, operands: list[T]) -> Sequence[T]:
        """The values of the results of an equation."""

    def literal(self, atom: Any, owner: Any, place: int) -> T:
        """The value of a literal.

        Args:
          atom: the literal.
          owner: the equation or the jaxpr that reads it.
          place: its number among what the owner reads.
        """
        del owner, place
        return self.constant(atom.val)

    def constants(self, closed: Any) -> Sequence[T]:
        """The values of the constants of a closed jaxpr."""
        return list(map(self.constant, closed.consts))

    def evaluate(self, jaxpr: Any, inputs: Sequence[T]) -> list[T]:
        """The values of the results of a jaxpr, open or closed."""
        if isinstance(jaxpr, core.ClosedJaxpr):
            return self.run(jaxpr.jaxpr, self.constants(jaxpr), inputs)
        return self.run(jaxpr, (), inputs)

    def call(self, eqn: Any, operands: Sequence[T]) -> list[T]:
        """The values of the results of an equation of `CALLS`."""
        return self.evaluate(called_jaxpr(eqn), operands)

    def run(self, jaxpr: Any, constants: Sequence[T], inputs: Sequence[T]) -> list[T]:
        """The values of the results of an open jaxpr.

        Args:
          jaxpr: the jaxpr.
          constants: the values of its constants.
          inputs: the values of its arguments.
        """
        given = (*jaxpr.constvars, *jaxpr.invars), (*constants, *inputs)
        known: dict[Any, T] = dict(zip(*given, strict=True))

        def read(atoms: Sequence[Any], owner: Any) -> list[T]:
            return [
                self.literal(atom, owner, place)
                if isinstance(atom, core.Literal)
                else known[atom]
                for place, atom in enumerate(atoms)
            ]

        for eqn in jaxpr.eqns:
            results = self.equation(eqn, read(eqn.invars, eqn))
            known.update(zip(eqn.outvars, results, strict=True))
        return read(jaxpr.outvars, jaxpr)
