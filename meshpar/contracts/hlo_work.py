"""FLOPs of a compiled program and the bytes that it moves, with every round of loops.

XLA's cost analysis counts the body of a loop once. The rounds are added here: matmuls
and convolutions are counted in the text of the program, once and in every round.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from meshpar.contracts.hlo_text import (
    Instruction,
    parse_computations,
    trip_count,
)

_SHAPE = re.compile(r"\b[a-z]\w*\[([\d,]*)\]")
_CONTRACTED = re.compile(r'\blhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")


class Work(NamedTuple):
    """Work of one device in one run of a program.

    Attributes:
      flops: all of them; a multiplication and an addition are two.
      moved: bytes that its instructions read from memory and write.
    """

    flops: float
    moved: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.moved


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
        return _convolution_flops(instruction, scope)
    if opcode in ("dot", "custom-call") and (found := _CONTRACTED.search(line)):
        lhs, places = _dims(scope[instruction.operands[0]]), found.group(1)
        contracted = (lhs[int(dim)] for dim in re.findall(r"\d+", places))
        return 2.0 * math.prod(_dims(instruction)) * math.prod(contracted)
    return 0.0


def _convolution_flops(
    instruction: Instruction, scope: Mapping[str, Instruction]
) -> float:
    """FLOPs of a convolution; products with padding and with holes are none.

    TPUs write matmuls with several contracted dims so: most taps of their windows meet
    padding alone.
    """
    labels = _LABELS.search(instruction.line).groups()
    arrays = *(scope[name] for name in instruction.operands[:2]), instruction
    image, kernel, result = (
        dict(zip(own, _dims(array), strict=True))
        for own, array in zip(labels, arrays, strict=True)
    )
    window = _WINDOW.search(instruction.line)
    pairs = (field.split("=") for field in (window.group(1) if window else "").split())
    fields = {name: values.split("x") for name, values in pairs}
    places = sorted(label for label in result if label.isdigit())
    met = math.prod(
        _products(
            image[place],
            kernel[place],
            result[place],
            {name: values[index] for name, values in fields.items()},
        )
        for index, place in enumerate(places)
    )
    return 2.0 * result["b"] * result["f"] * kernel["i"] * met


def _products(size: int, taps: int, results: int, window: Mapping[str, str]) -> int:
    """Products along one dim of a convolution: (result, tap) on a number of the image.

    Args:
      size: of the image.
      taps: of the kernel.
      results: places of the kernel.
      window: {field of HLO's window: its value in this dim}.
    """
    stride, holes, spread = (
        int(window.get(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate")
    )
    low = int(window["pad"].split("_")[0]) if "pad" in window else 0
    ways = np.arange(results) * stride - low, np.arange(taps) * spread
    few, many = sorted(ways, key=len)
    found = 0
    for start in few:
        at = start + many
        inside = (at >= 0) & (at <= (size - 1) * holes) & (at % holes == 0)
        found += int(np.count_nonzero(inside))
    return found


def _dims(instruction: Instruction) -> tuple[int, ...]:
    """Sizes of the result's dims; of the first result, if there are several."""
    sizes = _SHAPE.search(instruction.type).group(1)
    return tuple(int(size) for size in sizes.split(",") if size)
