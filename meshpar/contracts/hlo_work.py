"""FLOPs of a compiled program and the bytes that it moves, with every round of loops.

XLA's cost analysis counts the body of a loop once. The rounds are added here: matmuls
and convolutions are counted in the text of the program, once and in every round.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from meshpar.contracts.hlo_text import (
    Instruction,
    parse_computations,
    trip_count,
)

_SHAPE = re.compile(r"\b[a-z]\w*\[([\d,]*)\]")
_CONTRACTED = re.compile(r'\blhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_KERNEL_DIMS = re.compile(r"\bdim_labels=\w+_(\w+)->")
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")


class Work(NamedTuple):
    """Work of one device in one run of a program.

    Attributes:
      flops: all of them; a multiplication and an addition are two.
      moved: bytes that its instructions read from memory and write.
    """

    flops: float
    moved: float


def work_of(text: str, analysis: Mapping[str, float]) -> Work:
    """The work of a compiled program.

    Args:
      text: `jax.stages.Compiled.as_text()`.
      analysis: `jax.stages.Compiled.cost_analysis()`. Its bytes grow with the rounds of
        loops as its FLOPs do.
    """
    flops, moved = (analysis.get(key, 0.0) for key in ("flops", "bytes accessed"))
    if not flops:
        return Work(flops, moved)
    all_flops = flops + matmul_flops(text) - matmul_flops(text, loops_once=True)
    return Work(all_flops, moved * all_flops / flops)


def matmul_flops(text: str, loops_once: bool = False) -> float:
    """FLOPs of the matmuls and convolutions of a program; of branches the most.

    Calls of libraries for convolutions (cuDNN) are left out.

    Args:
      text: `jax.stages.Compiled.as_text()`.
      loops_once: whether to count one round of each loop. A loop whose rounds the data
        decide counts once in any case.
    """
    computations, entry = parse_computations(text)

    def rounds(loop: Instruction) -> int:
        try:
            return 1 if loops_once else trip_count(loop, computations)
        except ValueError:
            return 1

    @functools.cache
    def inside(name: str) -> float:
        scope = computations.get(name, {})
        return sum(_flops(x, scope, inside, rounds) for x in scope.values())

    return inside(entry)


def _flops(
    instruction: Instruction,
    scope: Mapping[str, Instruction],
    inside: Callable[[str], float],
    rounds: Callable[[Instruction], int],
) -> float:
    """FLOPs of one instruction, with the computations that it calls."""
    line, opcode = instruction.line, instruction.opcode
    if opcode == "while":
        return rounds(instruction) * inside(_BODY.search(line).group(1))
    if opcode == "conditional":
        return max(map(inside, instruction.callees), default=0.0)
    if own := own_flops(instruction, scope):
        return own
    if opcode.endswith(("-done", "-update")):
        return 0.0  # Their start has called the computation.
    return sum(map(inside, instruction.callees))


def own_flops(instruction: Instruction, scope: Mapping[str, Instruction]) -> float:
    """FLOPs of a matmul or a convolution; 0 for all other instructions.

    Args:
      instruction: of a computation.
      scope: that computation.
    """
    line, opcode = instruction.line, instruction.opcode
    if opcode == "convolution":
        kernel = _dims(scope[instruction.operands[1]])
        features = _KERNEL_DIMS.search(line).group(1).index("o")
        per_result = math.prod(kernel) / max(1, kernel[features])
        return 2.0 * math.prod(_dims(instruction)) * per_result
    if opcode in ("dot", "custom-call") and (found := _CONTRACTED.search(line)):
        lhs, places = _dims(scope[instruction.operands[0]]), found.group(1)
        contracted = (lhs[int(dim)] for dim in re.findall(r"\d+", places))
        return 2.0 * math.prod(_dims(instruction)) * math.prod(contracted)
    return 0.0


def _dims(instruction: Instruction) -> tuple[int, ...]:
    """Sizes of the result's dims; of the first result, if there are several."""
    sizes = _SHAPE.search(instruction.type).group(1)
    return tuple(int(size) for size in sizes.split(",") if size)
