"""FLOPs of a model, counted in traces of its parts."""

import dataclasses
import math
from typing import Any

from meshpar.jaxprs.walk import inner_jaxprs


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of matmuls for one row.

    Attributes:
      layer: of one layer's forward pass, kernels aside.
      narrow: the part of these in matmuls with an operand or a result whose last dim,
        such as head_dim, fills no row of a tile.
      kernels: of the same pass, inside of kernels written by hand (attention), as if
        they skipped nothing.
      outside: of embedding and head, forward and backward; a head that computes its
        logits again for the backward pass counts them twice.
    """

    layer: float
    narrow: float
    kernels: float
    outside: float


def matmul_flops(jaxpr: Any, narrower_than: int = 0) -> float:
    """FLOPs of the matmuls of a jaxpr, kernels aside; loops count every round.

    Args:
      jaxpr: of any function.
      narrower_than: if given, only matmuls count that have an operand or a result whose
        last dim is smaller.
    """
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            continue
        if eqn.primitive.name.startswith("ragged_dot"):
            rows, results = eqn.invars[0].aval.shape, eqn.outvars[0].aval.size
            total += 0.0 if narrower_than else 2.0 * results * rows[-1]
            continue
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            lhs = eqn.invars[0].aval.shape
            shared = math.prod(lhs[dim] for dim in contracted)
            shapes = (x.aval.shape for x in (*eqn.invars, *eqn.outvars))
            least = min((shape[-1] for shape in shapes if shape), default=0)
            if not narrower_than or least < narrower_than:
                total += 2.0 * math.prod(eqn.outvars[0].aval.shape) * shared
            continue
        inner = [matmul_flops(j, narrower_than) for j in inner_jaxprs(eqn)]
        if eqn.primitive.name == "scan":
            total += eqn.params["length"] * sum(inner)
        else:
            is_branch = eqn.primitive.name == "cond"
            total += max(inner, default=0) if is_branch else sum(inner)
    return total
