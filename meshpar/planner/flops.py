"""FLOPs of a model, counted in traces of its parts."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from meshpar.arrays import num_bytes
from meshpar.compat import scan_counts
from meshpar.jaxprs.flops import equation_flops
from meshpar.jaxprs.walk import equations, inner_jaxprs


class Kernel(NamedTuple):
    """A kernel of attention.

    Attributes:
      width: of a head.
      length: tokens of a sequence.
      computed: share of the scores that it computes: half of them if it is causal.
    """

    width: int
    length: int
    computed: float


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of matmuls for one row.

    Attributes:
      layer: of one layer's forward pass, kernels aside.
      grouped: the part of these in grouped matmuls.
      narrow: the part of the layer's in matmuls with an operand or a result whose last
        dim, such as head_dim, fills no row of a tile.
      float8: the part of the layer's in matmuls of operands in float8.
      kernels: of the same pass, inside of kernels written by hand (attention), as if
        they skipped nothing.
      outside: of embedding and head, forward and backward; a head that computes its
        logits again for the backward pass counts them twice.
      looped: bytes that the loops of a head read and write in all rounds of whole
        sequences, however many rows there are.
      kernel: cuDNN's, if that is what runs attention.
    """

    layer: float
    grouped: float
    narrow: float
    float8: float
    kernels: float
    outside: float
    looped: float
    kernel: Kernel | None = None


def cudnn_kernel(jaxpr: Any) -> Kernel | None:
    """The first kernel of attention by cuDNN in a jaxpr; None without one."""
    for eqn in equations(jaxpr):
        if eqn.primitive.name.startswith("dot_product_attention_fwd"):
            causal = "CAUSAL" in str(eqn.params["mask_type"])
            _, length, _, width = eqn.invars[0].aval.shape
            return Kernel(width, length, 0.5 if causal else 1.0)
    return None


def matmul_flops(jaxpr: Any, counts: Callable[[Any], bool] = lambda eqn: True) -> float:
    """FLOPs of the matmuls and convolutions of a jaxpr, kernels aside.

    Loops count every round, and conditionals the branch with the most.

    Args:
      jaxpr: of any function.
      counts: whether an equation counts.
    """
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            continue
        if flops := equation_flops(eqn):
            total += flops if counts(eqn) else 0.0
            continue
        inner = [matmul_flops(j, counts) for j in inner_jaxprs(eqn)]
        if eqn.primitive.name == "scan":
            total += eqn.params["length"] * sum(inner)
        else:
            is_branch = eqn.primitive.name == "cond"
            total += max(inner, default=0) if is_branch else sum(inner)
    return total


def grouped_flops(jaxpr: Any) -> float:
    """FLOPs of the grouped matmuls of a jaxpr that runs each once."""
    matmuls = (e for e in equations(jaxpr) if e.primitive.name.startswith("ragged_dot"))
    return sum(map(equation_flops, matmuls))


def looped_bytes(jaxpr: Any) -> float:
    """Bytes that loops read and write: constants in each round, what they carry twice.

    What a loop reads or writes slice by slice is left out.
    """
    total = 0.0
    for eqn in jaxpr.eqns:
        inner = [looped_bytes(j) for j in inner_jaxprs(eqn)]
        if eqn.primitive.name == "scan":
            consts, carried = scan_counts(eqn)
            sizes = [num_bytes(x.aval) for x in eqn.invars[: consts + carried]]
            own = sum(sizes[:consts]) + 2 * sum(sizes[consts:])
            total += eqn.params["length"] * (own + sum(inner))
        else:
            is_branch = eqn.primitive.name == "cond"
            total += max(inner, default=0) if is_branch else sum(inner)
    return total


def in_float8(eqn: Any) -> bool:
    """Whether both operands of a matmul are in float8."""
    dtypes = [x.aval.dtype for x in eqn.invars[:2]]
    return all(jnp.issubdtype(t, jnp.floating) and t.itemsize == 1 for t in dtypes)


def last_dim(eqn: Any) -> float:
    """The smallest last dim of a dense matmul's operands and result; else infinity."""
    if eqn.primitive.name != "dot_general":
        return math.inf
    shapes = (x.aval.shape for x in (*eqn.invars, *eqn.outvars))
    return min((shape[-1] for shape in shapes if shape), default=0)
