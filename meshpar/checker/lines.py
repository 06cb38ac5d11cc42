"""Lines of a user's code for arguments and results of a step, and for the step itself.

A step's jaxpr tells which line reads an argument first, which line makes a result, and
where the function is defined. Shardings of arguments, the mesh, and the options of
jax.jit are values: no program says on which line they were written.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from meshpar.checker.facts import Facts
from meshpar.checker.leaves import Leaf
from meshpar.compat import defined_at, user_line
from meshpar.jaxprs.walk import inner_jaxprs


def definition(facts: Facts) -> str:
    """The line of the step's definition, or of its first decorator; "" if unknown."""
    return defined_at(facts.jaxpr) if facts.jaxpr is not None else ""


def first_line(facts: Facts, leaf: Leaf) -> str:
    """The line of the user's code that first reads an argument; "" if unknown."""
    place = _place(leaf, facts.leaves)
    if facts.jaxpr is None or place is None:
        return ""
    if len(facts.jaxpr.invars) != len(facts.leaves):
        return ""
    return _read_at(facts.jaxpr, facts.jaxpr.invars[place])


def made_line(facts: Facts, result: Leaf) -> str:
    """The line of the user's code that makes a result; "" if unknown."""
    place = _place(result, facts.results)
    if facts.jaxpr is None or place is None:
        return ""
    return _made_at(facts.jaxpr, facts.jaxpr.outvars[place])


def _place(leaf: Leaf, leaves: Sequence[Leaf]) -> int | None:
    return next((i for i, x in enumerate(leaves) if x is leaf), None)


def _read_at(jaxpr: Any, variable: Any) -> str:
    for eqn, inner in _holders(jaxpr, variable, "invars"):
        line = _read_at(*inner) if inner else user_line(eqn)
        if line:
            return line
    return ""


def _made_at(jaxpr: Any, variable: Any) -> str:
    for eqn, inner in _holders(jaxpr, variable, "outvars"):
        return (inner and _made_at(*inner)) or user_line(eqn)
    return ""


def _holders(
    jaxpr: Any, variable: Any, side: str
) -> Iterator[tuple[Any, tuple[Any, Any] | None]]:
    """The equations with a variable on one side, "invars" or "outvars".

    With each stands, of a call, (the jaxpr that it runs, the variable inside of it).
    """
    for eqn in jaxpr.eqns:
        variables, inner = getattr(eqn, side), inner_jaxprs(eqn)
        places = [i for i, x in enumerate(variables) if x is variable]
        if not places:
            continue
        is_call = len(inner) == 1 and len(getattr(inner[0], side)) == len(variables)
        yield eqn, (inner[0], getattr(inner[0], side)[places[0]]) if is_call else None
