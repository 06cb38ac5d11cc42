"""Rules of loops: collectives that belong before or after a loop, and run inside."""

import re
from collections.abc import Iterator

from meshpar.checker.facts import Facts, Move
from meshpar.checker.finding import Finding
from meshpar.checker.flow import CASTS, Value
from meshpar.contracts.hlo_text import Instruction


def constant_in_loop(facts: Facts) -> Iterator[Finding]:
    """Collectives inside a loop that move the same numbers in every round."""
    for move in facts.moves:
        body, runs = _loop(facts, move), move.collective.executions
        if body is None or runs < 2 or move.value.computation != body:
            continue
        if set(move.instruction.operands) <= facts.flow.constant_in_loop(body):
            leaf = facts.argument(Value(body, move.instruction.operands[0]))
            name = f" of {leaf.name}" if leaf else ""
            yield _found(
                move,
                f"the {move.kind}{name} gives the same in each of {runs} rounds",
                "move it before the loop, and close over its result",
            )


def reduced_in_every_round(facts: Facts) -> Iterator[Finding]:
    """Gradients that are reduced in every microbatch, and then added up."""
    for move in facts.moves:
        body, runs = _loop(facts, move), move.collective.executions
        if move.kind not in ("all_reduce", "reduce_scatter") or runs < 2:
            continue
        if body == move.value.computation and _added_to_carry(facts, body, move.value):
            yield _found(
                move,
                f"a sum over devices runs in each of {runs} rounds of a loop that adds "
                "up its results",
                "add up the local values, and reduce once after the loop: shard_map "
                "over the axes of the batch with the loop inside, psum behind it",
            )


def _loop(facts: Facts, move: Move) -> str | None:
    return facts.flow.loop_of(move.value.computation)


def _added_to_carry(facts: Facts, body: str, value: Value) -> bool:
    """Whether a value, or a slice of it, is added to what the loop carries."""
    waiting, seen = [value], {value}
    while waiting:
        for reader in facts.flow.readers(waiting.pop()):
            x = facts.flow.instruction(reader)
            if x.opcode == "dynamic-slice" and reader not in seen:
                seen.add(reader)
                waiting.append(reader)
            if x.opcode != "add":
                continue
            others = [Value(reader.computation, name) for name in x.operands]
            carried = any(_is_carried(facts, body, other) for other in others)
            if carried and _is_handed_on(facts, body, reader):
                return True
    return False


def _is_carried(facts: Facts, body: str, value: Value) -> bool:
    """Whether a value is what the round before has left."""
    origin = facts.flow.origin(value)
    scope = facts.module.computations.get(origin.computation, {})
    x = scope.get(origin.name)
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
