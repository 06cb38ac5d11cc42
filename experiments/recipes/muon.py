"""Muon: updates of matrices whose singular values are all near 1.

Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024
  (kellerjordan.github.io/posts/muon), for the iteration and its coefficients, which run
  in bfloat16; Liu et al., Muon is Scalable for LLM Training, arXiv:2502.16982, section
  2.2, equation 4, for weight decay and the scale of updates, with which AdamW's
  learning rates fit.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import meshpar

_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_RMS = 0.2
"""Root mean square of AdamW's updates, which those of matrices are given, too."""

_STACKED = "layers", "expert"
_NOT_HIDDEN = frozenset(("vocab", "length", None))
"""Names of dims of embeddings and heads, and of a router's experts."""


class Matrix(NamedTuple):
    """How a tensor of a layer is a matrix of inputs and outputs.

    Attributes:
      stacked: leading dims that hold many matrices: layers and experts.
      inputs: dims after them that are inputs; those that follow are outputs.
    """

    stacked: int
    inputs: int


def matrix_of(names: tuple[str | None, ...] | None) -> Matrix | None:
    """How a tensor is a matrix between features and something else, by its dim names.

    None for all that AdamW updates: embeddings, heads, norms, biases and routers.
    """
    names = names or ()
    stacked = sum(name in _STACKED for name in names)
    rest = names[stacked:]
    if len(rest) < 2 or _NOT_HIDDEN & set(rest) or rest.count("embed") != 1:
        return None
    if rest[0] == "embed":
        return Matrix(stacked, 1)
    return Matrix(stacked, len(rest) - 1) if rest[-1] == "embed" else None


def orthogonal(x: jax.Array, dtype: jnp.dtype = jnp.bfloat16) -> jax.Array:
    """The matrix [inputs, outputs] with singular values near 1.

    Args:
      x: the matrix.
      dtype: of the iterations and the result.
    """
    x = x.astype(dtype)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / (jnp.linalg.norm(x.astype(jnp.float32)) + 1e-7).astype(x.dtype)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


def muon(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float,
    weight_decay: float,
    model: meshpar.Model,
) -> optax.GradientTransformation:
    """Muon for tensors that `matrix_of` knows.

    Args:
      learning_rate: of AdamW's scale.
      momentum: decay of the running sum of gradients, per step (Nesterov's).
      weight_decay: weights shrink by this times the learning rate in a step.
      model: names the dims of the tensors.
    """
    names = _names(model)

    def update(updates: Any, _: Any) -> Any:
        def one(keys: tuple, x: jax.Array) -> jax.Array:
            matrix = matrix_of(names["/".join(str(key.key) for key in keys)])
            split = matrix.stacked + matrix.inputs
            sizes = (
                math.prod(x.shape[matrix.stacked : split]),
                math.prod(x.shape[split:]),
            )
            turn = orthogonal
            for _ in range(matrix.stacked):
                turn = jax.vmap(turn)
            # As bfloat16 before and after all else: it is what travels to owners.
            narrow = x.astype(jnp.bfloat16)
            flat = turn(narrow.reshape(*x.shape[: matrix.stacked], *sizes))
            scale = _RMS * math.sqrt(max(sizes))
            return scale * flat.reshape(x.shape).astype(x.dtype)

        return jax.tree_util.tree_map_with_path(one, updates)

    return optax.chain(
        optax.trace(momentum, nesterov=True),
        optax.stateless(update),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def labels(model: meshpar.Model) -> Any:
    """A function of the model's own tree: "muon" or "adamw" for each tensor."""
    names = _names(model)

    def label(keys: tuple, _: Any) -> str:
        path = "/".join(str(key.key) for key in keys)
        return "adamw" if matrix_of(names[path]) is None else "muon"

    return lambda params: jax.tree_util.tree_map_with_path(label, params)


def _names(model: meshpar.Model) -> dict[str, tuple[str | None, ...] | None]:
    """{path in the model's own tree: names of the dims}."""
    names = {path: param.names for path, param in model.params.items()}
    for stack, paths in model.rows.items():
        own = names[stack] and names[stack][1:]
        names |= {path: own for path in paths if path is not None}
    return names
