"""Finds collectives of a compiled program that may mix with a loop's collectives.

XLA:CPU starts operations that use the same communicator in the order of the schedule,
but a loop counts as started with its first round. A collective that follows the loop
and reads nothing of it may then run between any two collectives of the loop, at another
place on every device (`Platform.mixes_collectives`).
"""

import re
from collections.abc import Iterator, Mapping

from meshpar.contracts.hlo import HloModule, called, is_collective
from meshpar.contracts.hlo_text import Instruction


def order_violations(module: HloModule) -> list[str]:
    """One line for each collective that does not wait for a loop before it.

    Args:
      module: a program compiled for CPUs.
    """
    found = [
        mixed
        for computation in module.computations.values()
        for mixed in _mixed_in(computation, module.moving)
    ]

    def place(instruction: Instruction) -> str:
        frame = re.search(r"stack_frame_id=(\d+)", instruction.line)
        source = module.sources.get(frame.group(1), "") if frame else ""
        return f"{instruction.name} ({source})" if source else instruction.name

    return [
        f"{place(collective)} may run among the collectives of a loop that it does not "
        f"wait for, {', '.join(map(place, loops))}: CPUs mix them up"
        for collective, loops in found
    ]


def _mixed_in(
    computation: Mapping[str, Instruction], moving: frozenset[str]
) -> Iterator[tuple[Instruction, list[Instruction]]]:
    """Pairs of (instruction with collectives, the loops that it may mix with)."""
    loops: list[str] = []
    none: frozenset[str] = frozenset()
    read: dict[str, frozenset[str]] = {}  # The loops that an instruction waits for.
    for name, instruction in computation.items():
        own = none.union(*(read.get(operand, none) for operand in instruction.operands))
        inside = not moving.isdisjoint(called(instruction))
        if inside or is_collective(instruction):
            if mixed := [computation[loop] for loop in loops if loop not in own]:
                yield instruction, mixed
        if inside and instruction.opcode == "while":
            loops.append(name)
            own |= {name}
        read[name] = own
