"""Sufficient factors of a dense layer's gradient (Poseidon): x and dy instead of dW.

The gradient of y = x W is x^T dy. Data-parallel devices may sum it by an all_reduce of
W's shape, or all_gather its factors x[rows, in] and dy[rows, out] and multiply those of
all devices themselves. The factors are fewer bytes where a step has few rows and the
layer is large, as the last layers of image classifiers; they cost each device the
matmul of all rows. Language models have more rows (tokens) than that in every step.

Call the functions with arrays inside shard_map.

Source: Xie et al., arXiv:1512.06216 (sufficient factor broadcasting); Zhang et al.,
  Poseidon, USENIX ATC 2017, arXiv:1706.03292, section 3.2, table 1 and algorithm 1.
"""

import jax
from jax import lax

from meshpar.arrays import Array
from meshpar.contracts import cost
from meshpar.errors import MeshparError

DENSE, FACTORS = "dense", "factors"
"""Ways to sum a dense layer's gradient over devices."""


def dense_bytes(num_in: int, num_out: int, n: int, itemsize: int = 4) -> float:
    """Bytes that one device sends to all_reduce a gradient [in, out] over n devices."""
    return cost.wire_bytes("all_reduce", num_in * num_out * itemsize, n)


def factor_bytes(
    rows: int, num_in: int, num_out: int, n: int, itemsize: int = 4
) -> float:
    """Bytes that one device sends to all_gather both factors.

    Args:
      rows: rows of x on all devices together; of a language model, tokens.
      num_in: width of x.
      num_out: width of y.
      n: number of devices.
      itemsize: bytes of a number.
    """
    return cost.wire_bytes("all_gather", rows * (num_in + num_out) * itemsize, n)


def pick(rows: int, num_in: int, num_out: int) -> str:
    """`FACTORS` if they are fewer bytes than the `DENSE` gradient, on any devices.

    Both costs have the factor (n-1)/n, so that only the rows decide: factors where
    rows < 2 in out / (in + out). Poseidon's algorithm 1 with as many servers as workers
    says the same, with K rows on each of P workers: P K (in + out) <= 2 in out.

    Args:
      rows: rows of x on all devices together.
      num_in: width of x.
      num_out: width of y.

    Raises:
      MeshparError: a size below 1.
    """
    sizes = {"rows": rows, "num_in": num_in, "num_out": num_out}
    if bad := {name: size for name, size in sizes.items() if size < 1}:
        raise MeshparError(f"sizes of a dense layer: {bad}; use at least 1")
    fewer = rows * (num_in + num_out) < 2 * num_in * num_out
    return FACTORS if fewer else DENSE


def most_rows(num_in: int, num_out: int) -> float:
    """Rows of all devices together below which the factors are fewer bytes."""
    return 2 * num_in * num_out / (num_in + num_out)


def dense(x_RI: Array, w_IO: Array, axis: str) -> Array:
    """Multiplies x W; the gradient of W is summed over `axis` by its factors.

    x[R_axis, I], W[I, O] -> y[R_axis, O]. The gradient of W is whole and the same on
    all devices: nothing is left to reduce. It is that of the sum of the devices'
    losses. Communication in the backward pass: an all_gather of x and one of dy.

    Args:
      x_RI: this device's rows.
      w_IO: the whole weight, the same on all devices of `axis`.
      axis: mesh axis that splits the rows.

    Returns:
      This device's rows of y.

    Raises:
      MeshparError: shapes that do not fit.
    """
    if x_RI.ndim != 2 or w_IO.ndim != 2 or x_RI.shape[1] != w_IO.shape[0]:
        raise MeshparError(
            f"dense of x{list(x_RI.shape)} and W{list(w_IO.shape)}: use x[rows, in] "
            "and W[in, out]; reshape batches of sequences to rows"
        )
    return _dense(x_RI, w_IO, axis)


def _dense(x_RI: Array, w_IO: Array, axis: str) -> Array:
    @jax.custom_vjp
    def apply(x_RI: Array, w_IO: Array) -> Array:
        return x_RI @ w_IO

    def forward(x_RI: Array, w_IO: Array) -> tuple[Array, tuple[Array, Array]]:
        return x_RI @ w_IO, (x_RI, w_IO)

    def backward(saved: tuple[Array, Array], dy_RO: Array) -> tuple[Array, Array]:
        x_RI, w_IO = saved
        # "invarying": all devices have the same rows, so their products are the same.
        all_x, all_dy = (
            lax.all_gather(rows, axis, tiled=True, to="invarying")
            for rows in (x_RI, dy_RO)
        )
        return dy_RO @ w_IO.T, all_x.T @ all_dy

    apply.defvjp(forward, backward)
    return apply(x_RI, w_IO)
