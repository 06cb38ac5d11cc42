"""Code of a jaxpr that its results need."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval
from jax.random import key_data

from meshpar.arrays import is_key
from meshpar.compat import scan_counts
from meshpar.jaxprs.walk import equations

_BARRIER = "optimization_barrier"


def without_dead_code(jaxpr: Any, through_barriers: bool = False) -> Any:
    """A jaxpr without the code that its results do not need, in inner jaxprs as well.

    Args:
      jaxpr: of a whole program.
      through_barriers: whether to leave out what an optimization barrier alone keeps,
        with other arrays that are needed; compilers leave it out late.
    """
    jaxpr = jaxpr.jaxpr
    if through_barriers:
        jaxpr = _with_single_barriers(jaxpr)
    jaxpr = _needed(jaxpr)
    if any(map(_runs_once, equations(jaxpr))):
        jaxpr = _needed(_with_results_read(jaxpr))
    return jaxpr


def with_results(closed: Any, wanted: Sequence[bool]) -> Any:
    """A closed jaxpr with some of its results, and the code that those need."""
    return closed.replace(jaxpr=_needed(closed.jaxpr, wanted))


def has_barriers(jaxpr: Any) -> bool:
    """Whether an optimization barrier anywhere in a jaxpr holds several arrays."""
    return any(
        eqn.primitive.name == _BARRIER and len(eqn.invars) > 1
        for eqn in equations(jaxpr)
    )


def _runs_once(eqn: Any) -> bool:
    """Whether an equation is a loop of one round."""
    return eqn.primitive.name == "scan" and eqn.params["length"] == 1


def _needed(jaxpr: Any, wanted: Sequence[bool] = ()) -> Any:
    """A jaxpr without the equations that its results, or those wanted, do not need."""
    wanted = wanted or [True] * len(jaxpr.outvars)
    return partial_eval.dce_jaxpr(jaxpr, list(wanted), instantiate=True)[0]


def inputs_read(closed: Any) -> list[bool]:
    """For each input of a closed jaxpr, whether its results need it."""
    needed = [True] * len(closed.jaxpr.outvars)
    return partial_eval.dce_jaxpr(closed.jaxpr, needed)[1]


def compute_the_same(first: Any, second: Any) -> bool:
    """Whether two closed jaxprs have the same live code and the same constants.

    If it says no, they may compute the same in other words.
    """
    codes = [str(_with_counts(_needed(closed.jaxpr))) for closed in (first, second)]
    constants = [
        [np.asarray(key_data(x) if is_key(x) else x).tobytes() for x in closed.consts]
        for closed in (first, second)
    ]
    return codes[0] == codes[1] and constants[0] == constants[1]


def _with_counts(jaxpr: Any) -> Any:
    """A jaxpr to compare, whose loops tell their operands apart by numbers alone.

    Newer versions of jax describe them as they were before dead code was left out.
    """
    eqns = []
    for eqn in jaxpr.eqns:
        params = _inner(eqn.params, _with_counts)
        if eqn.primitive.name == "scan":
            params = {k: x for k, x in params.items() if k not in ("ft_in", "ft_out")}
            params["counts"] = scan_counts(eqn)
        eqns.append(eqn.replace(params=params))
    return jaxpr.replace(eqns=eqns)


def _with_results_read(jaxpr: Any) -> Any:
    """A jaxpr whose loops of one round hand on only the values that are read.

    A loop computes what it carries for its next round. Compilers unroll a loop that has
    no next round, and leave out what nothing reads.
    """
    read = {x for eqn in jaxpr.eqns for x in eqn.invars if isinstance(x, core.Var)}
    read |= {x for x in jaxpr.outvars if isinstance(x, core.Var)}
    eqns = []
    for eqn in jaxpr.eqns:
        params = _inner(eqn.params, _with_results_read)
        if _runs_once(eqn):
            consts, carried = scan_counts(eqn)
            body = params["jaxpr"].jaxpr
            outs = list(body.outvars)
            for number in range(carried):
                if eqn.outvars[number] not in read:
                    outs[number] = body.invars[consts + number]
            closed = params["jaxpr"].replace(jaxpr=body.replace(outvars=outs))
            params = {**params, "jaxpr": closed}
        eqns.append(eqn.replace(params=params))
    return jaxpr.replace(eqns=eqns)


def _with_single_barriers(jaxpr: Any) -> Any:
    """A jaxpr in which every barrier holds one array."""
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == _BARRIER:
            eqns += [
                eqn.replace(invars=[x], outvars=[y])
                for x, y in zip(eqn.invars, eqn.outvars, strict=True)
            ]
        else:
            params = _inner(eqn.params, _with_single_barriers)
            eqns.append(eqn.replace(params=params))
    return jaxpr.replace(eqns=eqns)


def _inner(params: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The parameters of an equation, with their jaxprs changed."""

    def inside(value: Any) -> Any:
        if isinstance(value, core.ClosedJaxpr) and value.jaxpr is not value:
            return value.replace(jaxpr=change(value.jaxpr))
        if isinstance(value, core.Jaxpr):
            return change(value)
        return tuple(map(inside, value)) if type(value) is tuple else value

    return {name: inside(value) for name, value in params.items()}
