"""Rules for control flow: scan, while, cond and switch."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from meshpar import compat
from meshpar.jaxprs.walk import equations
from meshpar.rows import draws
from meshpar.rows.arithmetic import elementwise, joined, same
from meshpar.rows.values import PLAIN, Counted, Fixed, Mixed, PerRow, Test

Run = Callable[[Any, Sequence[Any]], list[Any]]
"""(jaxpr, values of its inputs) -> values of its outputs."""

_MAX_ROUNDS = 8
"""Rounds after which a loop's carry has to stay as it is."""


def scan(eqn: Any, values: list[Any], run: Run) -> list[Any]:
    """Rule for scan."""
    num_consts, num_carry = compat.scan_counts(eqn)
    consts, carry = values[:num_consts], values[num_consts:][:num_carry]
    slices = [_slice(v) for v in values[num_consts + num_carry :]]

    def step(carry: list[Any]) -> list[Any]:
        return run(eqn.params["jaxpr"], [*consts, *carry, *slices])

    outputs = _settled(step, list(carry))
    return [*outputs[:num_carry], *map(_stacked, outputs[num_carry:])]


def over_rows(eqn: Any) -> Any:
    """A scan over rows as a jaxpr that runs its body for all of them side by side.

    It takes the operands of the scan. None for a scan whose rounds depend on each
    other, or draw random numbers.
    """
    num_consts, num_carry = compat.scan_counts(eqn)
    closed, held = eqn.params["jaxpr"], num_consts + num_carry
    body = closed.jaxpr
    if body.outvars[:num_carry] != body.invars[num_consts:held]:
        return None
    if any(inner.primitive.name in draws.NAMES for inner in equations(body)):
        return None
    dims = [None] * held + [0] * (len(eqn.invars) - held)
    length = eqn.params["length"]
    outputs = [None] * num_carry + [0] * (len(eqn.outvars) - num_carry)
    each = jax.vmap(core.jaxpr_as_fun(closed), dims, outputs, axis_size=length)
    arguments = (jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars)
    return jax.make_jaxpr(each)(*arguments)


def loop(eqn: Any, values: list[Any], run: Run) -> list[Any]:
    """Rule for while."""
    params, num = eqn.params, eqn.params["cond_nconsts"]
    held, rest = values[:num], values[num:]
    consts, carry = rest[: params["body_nconsts"]], rest[params["body_nconsts"] :]

    def step(carry: list[Any]) -> list[Any]:
        return run(params["body_jaxpr"], [*consts, *carry])

    carry = _settled(step, list(carry))
    (goes_on,) = run(params["cond_jaxpr"], [*held, *carry])
    if isinstance(goes_on, Fixed):
        return carry
    if isinstance(goes_on, Counted):
        return [joined((goes_on, v)) for v in carry]
    return [Mixed("a loop runs as long as the batch says")] * len(carry)


def choice(eqn: Any, values: list[Any], run: Run) -> list[Any]:
    """Rule for cond and switch."""
    which, *operands = values
    branches = [run(body, operands) for body in eqn.params["branches"]]
    cases = list(zip(*branches, strict=True))
    if isinstance(which, Fixed):
        return [joined(each) for each in cases]
    if isinstance(which, Counted):
        return [joined((which, *each)) for each in cases]
    if isinstance(which, Test):
        return [elementwise("select_n", (which, *each)) for each in cases]
    if isinstance(which, Mixed):
        return [which] * len(cases)
    return [Mixed("the batch chooses what is computed")] * len(cases)


RULES = {"scan": scan, "while": loop, "cond": choice}
"""{primitive: rule for the values of its results}."""


def _settled(step: Callable[[list[Any]], list[Any]], carry: list[Any]) -> list[Any]:
    """Iterates a loop's body until its carry no longer changes (a fixed point)."""
    for _ in range(_MAX_ROUNDS):
        outputs = step(carry)
        new = [joined(pair) for pair in zip(carry, outputs, strict=False)]
        if all(map(same, new, carry)):
            return [*carry, *outputs[len(carry) :]]
        carry = new
    mixed = Mixed("a loop changes how a number depends on the rows")
    return [mixed] * len(outputs)


def _slice(value: Any) -> Any:
    """The slice of one round of a value that a scan runs over."""
    if isinstance(value, PLAIN):
        return value._replace(known=None)
    if isinstance(value, PerRow):
        if value.dim == 0:
            return Mixed("a loop runs over rows")
        return value._replace(dim=value.dim - 1, columns=())
    return value


def _stacked(value: Any) -> Any:
    """The stacked results of all rounds of a scan."""
    if isinstance(value, PLAIN):
        return value._replace(known=None)
    if isinstance(value, PerRow):
        return value._replace(dim=value.dim + 1, columns=())
    return value
