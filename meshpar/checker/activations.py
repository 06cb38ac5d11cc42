"""Rules of activations: held whole, constrained twice, computed on every device."""

import collections
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.core import Literal

from meshpar.checker.facts import Facts, arrays_of, op_name
from meshpar.checker.finding import CALL, MEMORY, Finding
from meshpar.checker.op_names import module_path
from meshpar.checker.shapes import is_of_state
from meshpar.compat import user_line
from meshpar.contracts.hlo_text import Instruction, type_bytes
from meshpar.contracts.hlo_work import own_flops
from meshpar.jaxprs.reach import ELEMENTWISE
from meshpar.jaxprs.walk import CALLS, called_jaxpr, inner_jaxprs, opened

_LONGEST = 20
"""Elementwise equations between two constraints, at most."""

_SHARE = 0.02
"""Share of a step's matmuls that may be the same on several devices."""


def replicated_activations(facts: Facts) -> Iterator[Finding]:
    """Activations that every device holds whole, though the batch is split."""
    if not facts.batch_axes or facts.num_devices == 1:
        return
    if not (whole := _global_shapes(facts)):
        return
    seen: dict[tuple[str, tuple[int, ...]], Finding] = {}
    for x in _scheduled(facts):
        if (line := facts.line(x)) not in whole or len(arrays_of(x.type)) != 1:
            continue
        ((dtype, shape),) = arrays_of(x.type)
        new = shape in whole[line] and (line, shape) not in seen
        if new and not is_of_state(facts, x.type):
            size = type_bytes(x.type)
            axes = tuple(axis for axis in facts.mesh if axis in facts.batch_axes)
            seen[line, shape] = Finding(
                f"the activation {dtype}{list(shape)} is whole on every device, and "
                "the batch is split",
                "hold it to its rows: jax.lax.with_sharding_constraint(x, "
                f"P({axes[0]!r}, ...)) at this line",
                size - size // math.prod(facts.mesh[axis] for axis in axes),
                MEMORY,
                axes,
                line,
                module_path(op_name(x)),
            )
    yield from seen.values()


def _scheduled(facts: Facts) -> Iterator[Instruction]:
    """The instructions that have a result in memory: not those inside fusions."""
    for name, scope in facts.module.computations.items():
        caller = facts.flow.callers.get(name)
        if name == facts.module.entry or (
            caller is not None and caller.instruction.opcode in ("while", "call")
        ):
            for x in scope.values():
                if x.opcode not in ("parameter", "get-tuple-element", "constant"):
                    yield x


def _global_shapes(facts: Facts) -> Mapping[str, set[tuple[int, ...]]]:
    """{line: the shapes of the whole arrays that it makes of two dims or more}."""
    found: dict[str, set[tuple[int, ...]]] = collections.defaultdict(set)
    for eqn in _outside_shard_map(facts.jaxpr):
        shapes = {tuple(x.aval.shape) for x in eqn.outvars if hasattr(x.aval, "shape")}
        if shapes := {shape for shape in shapes if len(shape) > 1}:
            found[user_line(eqn)] |= shapes
    return found


def _outside_shard_map(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr whose arrays are whole."""
    for eqn in () if jaxpr is None else jaxpr.eqns:
        if eqn.primitive.name != "shard_map":
            inner = inner_jaxprs(eqn)
            if not inner:
                yield eqn
            for body in inner:
                yield from _outside_shard_map(body)


def fighting_constraints(facts: Facts) -> Iterator[Finding]:
    """Two constraints of one array that differ, with nothing between that needs one."""
    if facts.jaxpr is None:
        return
    moved = collections.Counter[str]()
    for move in facts.moves:
        if not move.written:
            moved[move.line] += move.wire_bytes
    seen: set[str] = set()  # Their transposes are at the same lines.
    for jaxpr in (facts.jaxpr, *_inner(facts.jaxpr)):
        makers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
        for eqn in jaxpr.eqns:
            if eqn.primitive.name != "sharding_constraint":
                continue
            chain = _to_constraint_before(eqn, makers)
            line = user_line(eqn)
            if not chain or _spec(chain[-1]) == _spec(eqn) or line in seen:
                continue
            # The compiler moves an array where it is made, or where it is read.
            made = [makers[x] for x in _variables(chain[-1]) if x in makers]
            lines = {line, *map(user_line, [*chain, *made])}
            seen |= lines
            if size := sum(moved[at] for at in lines):
                yield Finding(
                    f"P{_spec(chain[-1])}, at {user_line(chain[-1])}, is followed by "
                    f"P{_spec(eqn)}, and no operation between needs the first",
                    "leave one of the two constraints out",
                    size,
                    line=line,
                )


def same_matmul(facts: Facts) -> Iterator[Finding]:
    """Matmuls that several devices compute of the same numbers."""
    total, same = 0.0, collections.Counter[tuple[str, tuple[str, ...]]]()
    paths: dict[str, str] = {}
    for name, scope in facts.module.computations.items():
        for x in scope.values():
            if not (flops := own_flops(x, scope)) or not (runs := facts.runs(name)):
                continue
            flops *= runs
            total += flops
            equal = facts.uniform.along(name, x.operands)
            if axes := tuple(axis for axis in facts.mesh if axis in equal):
                same[facts.line(x), axes] += flops
                paths[facts.line(x)] = module_path(op_name(x))
    for (line, axes), flops in same.items():
        if flops > _SHARE * total:
            count = math.prod(facts.mesh[axis] for axis in axes)
            yield Finding(
                f"{count} devices along {'*'.join(axes)} compute the same matmul: "
                f"{flops / total:.0%} of the FLOPs of the step",
                f"split its weight or its rows over {'*'.join(axes)}",
                of=CALL,
                axes=axes,
                line=line,
                path=paths[line],
            )


def _to_constraint_before(eqn: Any, makers: Mapping[Any, Any]) -> list[Any]:
    """The elementwise equations back to the constraint that an array had, with it."""
    chain: list[Any] = []
    while len(chain) < _LONGEST:
        shape = eqn.outvars[0].aval.shape
        arrays = [x for x in _variables(eqn) if x.aval.shape == shape and x in makers]
        if not arrays:
            return []
        eqn = makers[arrays[0]]
        chain.append(eqn)
        if eqn.primitive.name == "sharding_constraint":
            return chain
        if not _is_elementwise(eqn):
            return []
    return []


def _variables(eqn: Any) -> list[Any]:
    """The operands of an equation that are no literals."""
    return [x for x in eqn.invars if not isinstance(x, Literal)]


def _is_elementwise(eqn: Any) -> bool:
    if eqn.primitive.name in CALLS:
        return all(_is_elementwise(x) for x in opened(called_jaxpr(eqn))[0].eqns)
    return eqn.primitive.name in ELEMENTWISE or eqn.primitive.name == "broadcast_in_dim"


def _spec(eqn: Any) -> tuple[Any, ...]:
    spec = [*getattr(eqn.params["sharding"], "spec", ())]
    while spec and spec[-1] is None:
        spec.pop()
    return tuple(spec)


def _inner(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            yield inner
            yield from _inner(inner)
