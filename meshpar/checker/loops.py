"""Rules of loops: collectives that belong before or after a loop, and run inside."""

import dataclasses
import re
from collections.abc import Iterator

from meshpar.checker.facts import Facts, Move
from meshpar.checker.finding import Finding
from meshpar.checker.flow import CASTS, Value
from meshpar.contracts.hlo_text import Instruction

_PLACES = frozenset(
    "dynamic-slice slice pad concatenate select collective-permute "
    "collective-permute-start".split()
)
"""Opcodes that take parts of an array, or move them to other places: TPU programs pad a
sum that does not divide over the devices, and send the rows to where they belong."""


def constant_in_loop(facts: Facts) -> Iterator[Finding]:
    """Collectives inside a loop that move the same numbers in every round."""
    for move in facts.moves:
        body, runs = _loop(facts, move), move.collective.executions
        if body is None or runs < 2:
            continue
        operands = [
            Value(move.value.computation, name) for name in move.instruction.operands
        ]
        if all(_is_same_in_every_round(facts, body, x) for x in operands):
            leaf = facts.argument(operands[0])
            name = f" of {leaf.name}" if leaf else ""
            yield _found(
                move,
                f"the {move.kind}{name} gives the same in each of {runs} rounds",
                "move it before the loop, and close over its result",
            )


def _is_same_in_every_round(facts: Facts, body: str, value: Value) -> bool:
    if value.computation == body and value.name in facts.flow.constant_in_loop(body):
        return True
    made = facts.flow.origin(value)  # Of what is inside a fusion, or outside the loop.
    if made.computation == body:
        return made.name in facts.flow.constant_in_loop(body)
    return facts.flow.loop_of(made.computation) != body


def reduced_in_every_round(facts: Facts) -> Iterator[Finding]:
    """Gradients that are reduced in every microbatch, and then added up."""
    for move in facts.moves:
        body, runs = _loop(facts, move), move.collective.executions
        if move.kind not in ("all_reduce", "reduce_scatter") or runs < 2:
            continue
        if body and (addition := _added_to_carry(facts, body, move.result)):
            found = _found(
                move,
                f"a sum over devices runs in each of {runs} rounds of a loop that adds "
                "up its results",
                "add up the local values, and reduce once after the loop: shard_map "
                "over the axes of the batch with the loop inside, psum behind it",
            )
            # The sum that a compiler adds is at the matmul of which it is a part.
            line = move.line if move.written else _line(facts, addition)
            yield dataclasses.replace(found, line=line or move.line)


def _loop(facts: Facts, move: Move) -> str | None:
    return facts.flow.loop_of(move.value.computation)


def _added_to_carry(facts: Facts, body: str, value: Value) -> Value | None:
    """The addition of a value, its parts or multiples to what the loop carries."""
    waiting, seen = [value], {value}
    while waiting:
        for reader in facts.flow.readers(waiting.pop()):
            x = facts.flow.instruction(reader)
            if reader not in seen and (x.opcode in _PLACES or _scales(facts, reader)):
                seen.add(reader)
                waiting.append(reader)
            if x.opcode != "add":
                continue
            others = [Value(reader.computation, name) for name in x.operands]
            carried = any(_is_carried(facts, body, other) for other in others)
            if carried and _is_handed_on(facts, body, reader):
                return reader
    return None


def _scales(facts: Facts, value: Value) -> bool:
    """Whether a value is another one times a constant, as in a mean."""
    x = facts.flow.instruction(value)
    return x.opcode in ("multiply", "divide") and any(
        _is_constant(facts, Value(value.computation, name)) for name in x.operands
    )


def _is_constant(facts: Facts, value: Value) -> bool:
    """Whether a value is a number that the program states, or an array of it."""
    made = facts.flow.origin(value)
    x = facts.flow.instruction(made)
    if x.opcode == "broadcast":
        return _is_constant(facts, Value(made.computation, x.operands[0]))
    return x.opcode == "constant"


def _line(facts: Facts, value: Value) -> str:
    """The line of a value; of the fusion that it is a result of, if it has none."""
    values = value, *_fused(facts, value)
    lines = (facts.line(facts.flow.instruction(x)) for x in values)
    return next(filter(None, lines), "")


def _is_carried(facts: Facts, body: str, value: Value) -> bool:
    """Whether a value is what the round before has left, or zeros in the first."""
    origin = facts.flow.origin(value)
    scope = facts.module.computations.get(origin.computation, {})
    x = scope.get(origin.name)
    if x is not None and x.opcode == "select":
        choices = (Value(origin.computation, name) for name in x.operands[1:])
        return any(_is_carried(facts, body, choice) for choice in choices)
    if origin.computation != body or x is None or x.opcode != "get-tuple-element":
        return False
    source = scope.get(x.operands[0])
    return source is not None and source.opcode == "parameter"


def _is_handed_on(facts: Facts, body: str, value: Value) -> bool:
    """Whether a value is what a round leaves to the next one."""
    root = facts.flow.root(body)
    results = {facts.flow.origin(Value(body, name)) for name in root.operands}
    names = {value, *(_fused(facts, value))}
    return bool(results & names)


def _fused(facts: Facts, value: Value) -> Iterator[Value]:
    """The fusions whose result a value is."""
    while (caller := facts.flow.callers.get(value.computation)) is not None:
        root = facts.flow.root(value.computation)
        if caller.instruction.opcode != "fusion" or root is None:
            return
        made, inside = value.name, _results(facts, value.computation, root)
        if made not in inside:
            return
        value = Value(caller.computation, caller.instruction.name)
        yield value
        for x in facts.flow.users(value.computation).get(value.name, ()):
            if x.opcode == "get-tuple-element":
                place = int(re.search(r"\bindex=(\d+)", x.line).group(1))
                if place < len(inside) and inside[place] == made:
                    yield Value(value.computation, x.name)


def _results(facts: Facts, computation: str, root: Instruction) -> list[str]:
    """Names of the values that a fused computation returns, before casts."""
    scope = facts.module.computations[computation]
    names = list(root.operands) if root.opcode == "tuple" else [root.name]
    found = []
    for name in names:
        while scope[name].opcode in CASTS:
            name = scope[name].operands[0]
        found.append(name)
    return found


def _found(move: Move, what: str, remedy: str) -> Finding:
    spent = move.wire_bytes * (1 - 1 / move.collective.executions)
    return Finding(what, remedy, spent, axes=move.axes, line=move.line, path=move.path)
