"""Rules of collectives: moves without need, twice, too wide or in pieces."""

import collections
import math
from collections.abc import Iterator

from meshpar.checker.facts import Facts, Move, arrays_of, op_name
from meshpar.checker.finding import CALL, TRAFFIC, Finding
from meshpar.checker.flow import Value
from meshpar.checker.op_names import UPDATE
from meshpar.checker.shapes import is_of_state
from meshpar.contracts.hlo_groups import rotates
from meshpar.contracts.hlo_text import type_bytes
from meshpar.units import readable_bytes

_SMALL_BYTES = 64_000
"""Payload below which the start of a collective costs more than its bytes."""

_MANY = 32
"""Runs of small collectives, side by side, that could be one."""

_SHIFTS = ("slice", "concatenate", "pad", "conv_general_dilated", "rev")
"""Primitives whose results need the neighbors' elements, however they are split."""


def reshard(facts: Facts) -> Iterator[Finding]:
    """Arrays that the compiler moves to another sharding, where nothing asks for it."""
    for move in facts.moves:
        if move.written:
            continue
        if move.kind in ("all_to_all", "permute"):
            # TPUs shift parts of sums to their tiles, without a name.
            if op_name(move.instruction) and not _is_shift(facts, move):
                yield _found(
                    move,
                    f"the compiler moves {_arrays(move)} to another sharding "
                    f"({move.kind})",
                    "make both sides agree: jax.lax.with_sharding_constraint before "
                    "this line with the spec that the next operation needs, or the "
                    "weight with the spec that the activation has",
                )
        elif move.kind == "all_gather" and _is_activation(facts, move):
            if facts.batch_axes & set(move.axes):
                yield _found(
                    move,
                    f"the compiler gathers the activation {_arrays(move)} along "
                    "an axis of the batch",
                    "hold it to its rows: jax.lax.with_sharding_constraint(x, "
                    f"P({_batch_spec(facts)}, ...)) at this line, and the weight is "
                    "gathered instead",
                )
        elif move.kind == "all_reduce" and facts.batch_axes & set(move.axes):
            if move.phase != UPDATE and not is_of_state(facts, move.instruction.type):
                yield _found(
                    move,
                    f"the compiler sums the activation {_arrays(move)} over an axis "
                    "of the batch: every device computed a part of all rows",
                    "hold it to its rows: jax.lax.with_sharding_constraint(x, "
                    f"P({_batch_spec(facts)}, ...)) at this line",
                )


def gathered_and_sliced(facts: Facts) -> Iterator[Finding]:
    """Arrays of which a device gathers the whole, and reads its own part alone."""
    for move in facts.moves:
        if move.kind == "all_gather" and _only_own_part(facts, move):
            yield _found(
                move,
                f"{_arrays(move)} is gathered whole, and every device keeps a slice "
                "(involuntary full rematerialization)",
                "change the sharding in two steps that share a dim, or give the source "
                "the sharding of the result",
            )


def sliced_all_reduce(facts: Facts) -> Iterator[Finding]:
    """Sums that all devices get whole, while each reads its own part alone."""
    for move in facts.moves:
        # Compilers that never scatter sums say nothing of the program.
        by_choice = move.written or facts.platform.reduces_late
        if move.kind == "all_reduce" and by_choice and _only_own_part(facts, move):
            yield _found(
                move,
                f"{_arrays(move)} is summed whole, and every device keeps a slice",
                "jax.lax.psum_scatter sends half of the bytes; under jit, constrain "
                "the sum to the sharding of the slice",
                share=0.5 * _share_of_largest(move),
            )


def gathered_twice(facts: Facts) -> Iterator[Finding]:
    """Weights that are gathered more than once in one pass."""
    groups: dict[tuple, list[Move]] = collections.defaultdict(list)
    for move in facts.moves:
        if move.kind == "all_gather" and move.instruction.operands:
            operand = Value(move.value.computation, move.instruction.operands[0])
            origin = facts.flow.origin(operand)
            key = origin, move.axes, move.phase, move.value.computation
            groups[key].append(move)
    for (origin, *_), moves in groups.items():
        again = moves[1:]
        if again:
            leaf = facts.argument(origin)
            name = leaf.name if leaf else _arrays(moves[0])
            yield Finding(
                f"{name} is gathered {len(moves)} times in the {moves[0].phase} pass",
                "gather it once and hand the result on, or use it at one place",
                sum(move.wire_bytes for move in again),
                axes=moves[0].axes,
                line=again[0].line,
                path=again[0].path,
            )


def needless_all_reduce(facts: Facts) -> Iterator[Finding]:
    """Sums over axes along which all devices have the same numbers."""
    for move in facts.moves:
        if move.kind == "all_reduce" and not move.collective.partial:
            operands = enumerate(_operands(facts, move))
            same = [(i, x) for i, x in operands if _is_same(facts, move, x)]
            parts = [facts.flow.instruction(x).type for _, x in same]
            if same:
                dtype, shape = arrays_of(parts[0])[0]
                yield _found(
                    move,
                    f"{dtype}{list(shape)} is the same on all devices before this "
                    "all_reduce: a sum multiplies it, a mean changes nothing",
                    "leave the psum or pmean out: the value is reduced already",
                    sum(map(type_bytes, parts)) / max(1, move.collective.payload_bytes),
                    CALL,
                    facts.line_of_part(move, same[0][0]),
                )


def _operands(facts: Facts, move: Move) -> list[Value]:
    where = move.value.computation
    known = facts.module.computations[where]
    return [Value(where, name) for name in move.instruction.operands if name in known]


def _is_same(facts: Facts, move: Move, value: Value) -> bool:
    """Whether all devices have the same numbers, which are no constants.

    A sum of constants counts devices.
    """
    axes = facts.uniform.along(value.computation, [value.name])
    made = facts.flow.instruction(facts.flow.origin(value))
    return set(move.axes) <= axes and made.opcode not in ("constant", "broadcast")


def small_collectives(facts: Facts) -> Iterator[Finding]:
    """Many small collectives side by side that could be one."""
    groups: dict[tuple, list[Move]] = collections.defaultdict(list)
    for move in facts.moves:
        if move.collective.payload_bytes <= _SMALL_BYTES:
            groups[move.kind, move.axes, move.value.computation].append(move)
    for (kind, axes, computation), moves in groups.items():
        side_by_side = _side_by_side(facts, computation, moves)
        runs = sum(move.collective.executions for move in side_by_side)
        if len(side_by_side) > 1 and runs >= _MANY:
            lines = collections.Counter(move.line for move in side_by_side)
            line = max(lines, key=lambda line: (line != "", lines[line]))
            first = next(move for move in side_by_side if move.line == line)
            yield Finding(
                f"{runs} {kind}s of at most {readable_bytes(_SMALL_BYTES)} run side by "
                "side",
                "move them as one: the whole tree in one call, or one concatenated "
                "array",
                sum(move.wire_bytes for move in side_by_side),
                CALL,
                axes,
                line,
                first.path,
            )


def _side_by_side(facts: Facts, computation: str, moves: list[Move]) -> list[Move]:
    """The most collectives of a computation that do not wait for each other."""
    names = {move.value.name: move for move in moves}
    level: dict[str, int] = {}
    levels: dict[int, list[Move]] = collections.defaultdict(list)
    for name, x in facts.module.computations[computation].items():
        own = max((level.get(operand, 0) for operand in x.operands), default=0)
        if name in names:
            own += 1
            levels[own].append(names[name])
        level[name] = own
    return max(levels.values(), key=len, default=[])


def _only_own_part(facts: Facts, move: Move) -> bool:
    """Whether a result, of several the largest, is sliced by the number of the device.

    All that reads it does so.
    """
    value, computation = move.result, move.result.computation
    if len(move.arrays) > 1:
        sizes = [math.prod(shape) for _, shape in move.arrays]
        place = sizes.index(max(sizes))
        for x in facts.flow.users(computation).get(value.name, ()):
            if x.opcode == "get-tuple-element" and f"index={place}" in x.line:
                value = Value(computation, x.name)
    readers = list(facts.flow.readers(value))
    return bool(readers) and all(_slices_by_device(facts, x) for x in readers)


def _share_of_largest(move: Move) -> float:
    """The share of a collective's elements that its largest array has."""
    sizes = [math.prod(shape) for _, shape in move.arrays]
    return max(sizes) / max(1, sum(sizes))


def _slices_by_device(facts: Facts, value: Value) -> bool:
    x = facts.flow.instruction(value)
    return x.opcode == "dynamic-slice" and any(
        facts.flow.depends_on_position(Value(value.computation, operand))
        for operand in x.operands[1:]
    )


def _is_activation(facts: Facts, move: Move) -> bool:
    """Whether a gather is of no weight, gradient or optimizer state."""
    operand = Value(move.value.computation, move.instruction.operands[0])
    leaf = facts.argument_sliced(operand)
    if leaf is not None:
        return not any(leaf is x for x in facts.state)
    return not is_of_state(facts, move.instruction.type)


def _is_shift(facts: Facts, move: Move) -> bool:
    """Whether it exchanges elements with neighbors.

    Shifts of an array need it, and so do matmuls whose gathers run in rings.
    """
    line = move.instruction.line
    shifts = any(f'/{primitive}"' in line for primitive in _SHIFTS)
    return move.kind == "permute" and (shifts or rotates(line, facts.mesh))


def _batch_spec(facts: Facts) -> str:
    axes = [axis for axis in facts.mesh if axis in facts.batch_axes]
    return repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))


def _arrays(move: Move) -> str:
    """The arrays of a collective, in words."""
    arrays = sorted(arrays_of(move.instruction.type), key=lambda a: -math.prod(a[1]))
    arrays = [a for a in arrays if a[1]] or arrays
    dtype, shape = arrays[0]
    more = f" and {len(arrays) - 1} more" if len(arrays) > 1 else ""
    return f"{dtype}{list(shape)}{more}"


def _found(
    move: Move,
    what: str,
    remedy: str,
    share: float = 1.0,
    of: str = TRAFFIC,
    line: str | None = None,
) -> Finding:
    return Finding(
        what,
        remedy,
        move.wire_bytes * share,
        of,
        axes=move.axes,
        line=move.line if line is None else line,
        path=move.path,
    )
