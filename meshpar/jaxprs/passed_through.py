"""Results of a jaxpr that are inputs of it, handed through loops and calls."""

from typing import Any

from jax.extend import core

from meshpar import compat

_SAME_VALUE = ("pcast", "pvary")
"""Primitives that change the type of a value alone."""


def passed_through(jaxpr: Any) -> dict[Any, Any]:
    """{variable: the input of the jaxpr that it is}, for those that are one."""
    sources = {v: v for v in jaxpr.invars}
    for eqn in jaxpr.eqns:
        for out, atom in _kept(eqn):
            if not isinstance(atom, core.Literal) and atom in sources:
                sources[out] = sources[atom]
    return sources


def _kept(eqn: Any) -> list[tuple[Any, Any]]:
    """(output, the operand that it is) of an equation, for such outputs."""
    name, params = eqn.primitive.name, eqn.params
    if name in compat.CALLS:
        body, _ = compat.called_jaxpr(eqn)
        operands, carried = eqn.invars, None
    elif name == "scan":
        body, (num_consts, carried) = params["jaxpr"].jaxpr, compat.scan_counts(eqn)
        operands = eqn.invars[: num_consts + carried]
        first = num_consts
    elif name == "while":
        body = params["body_jaxpr"].jaxpr
        operands = eqn.invars[params["cond_nconsts"] :]
        first, carried = params["body_nconsts"], len(eqn.outvars)
    elif name in _SAME_VALUE:
        return list(zip(eqn.outvars, eqn.invars, strict=True))
    else:
        return []
    passed, inputs = passed_through(body), list(body.invars)
    kept = []
    for number, (out, inner) in enumerate(zip(eqn.outvars, body.outvars, strict=True)):
        if isinstance(inner, core.Literal) or inner not in passed:
            continue
        source = inputs.index(passed[inner])
        if carried is None or (number < carried and source == first + number):
            kept.append((out, operands[source]))
    return kept
