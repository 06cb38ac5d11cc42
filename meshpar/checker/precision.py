"""Rule of precision: float32 on the wire where the numbers are half as wide."""

import collections
from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.core import Literal

from meshpar.checker.facts import Facts, Move
from meshpar.checker.finding import Finding
from meshpar.checker.flow import Value
from meshpar.compat import user_line
from meshpar.contracts.written import kind_of
from meshpar.jaxprs.walk import inner_jaxprs

_WIDE, _NARROW = "float32", ("bfloat16", "float16")
_HLO_WIDE, _HLO_NARROW = "f32", ("bf16", "f16")


def float32_wire(facts: Facts) -> Iterator[Finding]:
    """Collectives of float32 whose operands were cast from bfloat16, or are cast to it.

    Those that the code writes are read from its jaxpr, as CPUs widen all of them.
    """
    written = set(_written_wide(facts))
    for move in facts.moves:
        asked = (move.kind, move.line) in written
        widened = facts.platform.widens_collectives or (
            move.written and facts.jaxpr is not None
        )
        if asked or (not widened and _is_wide(facts, move)):
            yield Finding(
                f"{move.kind} moves float32 that is bfloat16 before or after it",
                "cast after the collective where the operand is narrow, and before an "
                "all_gather whose result is cast down",
                move.wire_bytes / 2,
                axes=move.axes,
                line=move.line,
                path=move.path,
            )


def _is_wide(facts: Facts, move: Move) -> bool:
    """Whether the compiled program casts up before a collective, or down after it."""
    x = move.instruction
    dtypes = {dtype for dtype, shape in move.arrays if shape}
    if dtypes != {_HLO_WIDE} or not x.operands:
        return False
    scope = facts.module.computations[move.value.computation]
    source = scope.get(x.operands[0])
    while source is not None and source.opcode in ("copy", "bitcast", "reshape"):
        source = scope.get(source.operands[0])
    if source is not None and source.opcode == "convert":
        before = scope.get(source.operands[0])
        return before is not None and before.type.startswith(_HLO_NARROW)
    return move.kind == "all_gather" and _cast_down(facts, move.value)


def _cast_down(facts: Facts, value: Value) -> bool:
    """Whether all that reads a value, copies aside, casts it to a narrow dtype."""
    users = facts.flow.users(value.computation).get(value.name, [])
    return bool(users) and all(
        x.opcode == "convert" and x.type.startswith(_HLO_NARROW) for x in users
    )


def _written_wide(facts: Facts) -> Iterator[tuple[str, str]]:
    """Pairs of (kind, line) of the collectives that the code writes too wide."""
    if facts.jaxpr is None:
        return
    for jaxpr in _bodies(facts.jaxpr):
        makers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
        users: dict[Any, list[Any]] = collections.defaultdict(list)
        for eqn in jaxpr.eqns:
            for x in eqn.invars:
                if not isinstance(x, Literal):
                    users[x].append(eqn)
        for eqn in jaxpr.eqns:
            if (kind := kind_of(eqn)) and _wide(eqn, kind, makers, users):
                yield kind, user_line(eqn)


def _bodies(jaxpr: Any) -> Iterator[Any]:
    yield jaxpr
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            yield from _bodies(inner)


def _wide(
    eqn: Any, kind: str, makers: Mapping[Any, Any], users: Mapping[Any, list[Any]]
) -> bool:
    """Whether a collective of a jaxpr moves float32 that was or will be narrow."""
    for x in eqn.invars:
        maker = None if isinstance(x, Literal) else makers.get(x)
        while maker is not None and maker.primitive.name in ("pcast", "reshape"):
            maker = makers.get(maker.invars[0])
        cast = maker is not None and maker.primitive.name == "convert_element_type"
        if str(x.aval.dtype) == _WIDE and cast:
            if str(maker.invars[0].aval.dtype) in _NARROW:
                return True
    results = [str(x.aval.dtype) for x in eqn.outvars]
    readers = [reader for out in eqn.outvars for reader in users[out]]
    return (
        kind == "all_gather"
        and set(results) == {_WIDE}
        and bool(readers)
        and all(
            reader.primitive.name == "convert_element_type"
            and str(reader.params["new_dtype"]) in _NARROW
            for reader in readers
        )
    )
