"""FLOPs of the equations of a jaxpr."""

import math
from typing import Any


def equation_flops(eqn: Any) -> float:
    """FLOPs of a matmul or a convolution; 0 for all else.

    A convolution over rows with holes, as of the gradient of strided ones, counts no
    products with the zeros in the holes.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general" or name.startswith("ragged_dot"):
        ragged = params.get("ragged_dot_dimension_numbers")
        dims = ragged.dot_dimension_numbers if ragged else params["dimension_numbers"]
        (contracted, _), _ = dims
        shape = eqn.invars[0].aval.shape
        products = math.prod(shape[dim] for dim in contracted)
        if ragged and set(ragged.lhs_ragged_dimensions) & set(contracted):
            products /= eqn.invars[2].aval.shape[-1]  # Each group has rows of its own.
    elif name == "conv_general_dilated":
        spec = params["dimension_numbers"].rhs_spec
        kernel = math.prod(eqn.invars[1].aval.shape[dim] for dim in spec[1:])
        products = kernel / math.prod(params["lhs_dilation"])
    else:
        return 0.0
    return 2.0 * eqn.outvars[0].aval.size * products
