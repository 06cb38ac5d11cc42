"""Lines of a user's code for arguments and results of a step, and for the step itself.

A step's jaxpr tells which line reads an argument first, which line makes a result, and
where the function is defined. Shardings of arguments, the mesh, and the options of
jax.jit are values: no program says on which line they were written.
"""

from collections.abc import Sequence
from typing import Any

from meshpar.checker.facts import Facts
from meshpar.checker.leaves import Leaf
from meshpar.compat import defined_at, user_line
from meshpar.jaxprs.walk import inner_jaxprs


def definition(facts: Facts) -> str:
    """The line at which the step is defined, that of its decorators; "" if unknown."""
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
    for eqn in jaxpr.eqns:
        places = [i for i, x in enumerate(eqn.invars) if x is variable]
        if not places:
            continue
        inner = inner_jaxprs(eqn)
        if len(inner) == 1 and len(inner[0].invars) == len(eqn.invars):
            if line := _read_at(inner[0], inner[0].invars[places[0]]):
                return line
        elif line := user_line(eqn):
            return line
    return ""


def _made_at(jaxpr: Any, variable: Any) -> str:
    for eqn in jaxpr.eqns:
        places = [i for i, x in enumerate(eqn.outvars) if x is variable]
        if not places:
            continue
        inner = inner_jaxprs(eqn)
        if len(inner) == 1 and len(inner[0].outvars) == len(eqn.outvars):
            if line := _made_at(inner[0], inner[0].outvars[places[0]]):
                return line
        return user_line(eqn)
    return ""
