"""The layered form of a model: embed, a stack of equal layers, head with loss.

The explicit lowering and pipelines need to hold one layer at a time. A model says how
with `Stages`; `from_nnx` turns that into the pure functions of `Staged`, from which the
whole loss follows, so that the model is said once.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.arrays import Array, Params
from meshpar.layouts.scope import remat

Key = Array | None
"""A random key; None runs the model in evaluation mode."""


@dataclasses.dataclass(frozen=True)
class LayerStack:
    """How to run an NNX module layer by layer.

    Attributes:
      stack: attribute path of the stacked layers, such as "blocks": a module whose
        every variable has the number of layers as its first dim (`nnx.vmap`).
      embed: (module, batch) -> x, any pytree of activations.
      layer: (one layer's module, x) -> x of the same shapes.
      head_loss: (module, x, batch) -> loss or (loss, aux), a mean over the batch.

    `embed` and `head_loss` may use every variable outside the stack. All three see one
    shard of the batch: a loop inside them (`lax.scan`) has to start from values that
    come from the activations, or to carry nothing.
    """

    stack: str
    embed: Callable[[Any, Any], Any]
    layer: Callable[[Any, Any], Any]
    head_loss: Callable[[Any, Any, Any], Any]


def scan_layers(
    layer: Callable[[Params, Any, Key], Any], stack: Params, x: Any, key: Key
) -> Any:
    """Runs a stack of layers, each rematerialized as the layout in use says.

    Args:
      layer: (parameters of one layer, x, key) -> x.
      stack: {path: [depth, ...]}.
      x: activations.
      key: layer i gets `fold_in(key, i)`.
    """
    depth = len(next(iter(stack.values())))

    @remat
    def body(x: Any, one: tuple[Params, Array]) -> tuple[Any, None]:
        params, i = one
        return layer(params, x, fold_key(key, i)), None

    return jax.lax.scan(body, x, (stack, jnp.arange(depth)))[0]


def fold_key(key: Key, number: Any) -> Key:
    """`fold_in`, or None without a key."""
    return None if key is None else jax.random.fold_in(key, number)


@dataclasses.dataclass(frozen=True)
class LayeredModel:
    """A model as pure functions over {path: array}, layer by layer.

    Attributes:
      prefix: what the paths of stacked parameters begin with, such as "blocks/".
      depth: number of layers, the first dim of every stacked parameter.
      embed: (shared parameters, batch, key) -> x.
      layer: (parameters of one layer, x, key) -> x.
      head_loss: (shared parameters, x, batch, key) -> (loss, aux).
      evaluates: whether evaluation, too, is what the stages say.
    """

    prefix: str
    depth: int
    embed: Callable[[Params, Any, Key], Any]
    layer: Callable[[Params, Any, Key], Any]
    head_loss: Callable[[Params, Any, Any, Key], tuple[Array, dict]]
    evaluates: bool = True

    def split(self, params: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Shared entries and those of the stack."""
        shared = {p: x for p, x in params.items() if not p.startswith(self.prefix)}
        return shared, {p: x for p, x in params.items() if p not in shared}

    def loss(
        self,
        params: Params,
        batch: Any,
        key: Key,
        scan: Callable[[Callable, Params, Any, Key], Any] = scan_layers,
    ) -> tuple[Array, dict]:
        """The whole model: (loss, aux).

        Args:
          params: {path: array}.
          batch: the batch.
          key: random key, or None for evaluation.
          scan: runs the stack; as `scan_layers`.
        """
        shared, stack = self.split(params)
        x = self.embed(shared, batch, fold_key(key, 0))
        x = scan(self.layer, stack, x, fold_key(key, 1))
        x, shared = _gradients_together((x, shared))
        loss, aux = self.head_loss(shared, x, batch, fold_key(key, 2))
        return _before_its_gradient(loss), aux


@jax.custom_vjp
def _gradients_together(values: Any) -> Any:
    """The values; no gradient of them is used before all of them are made.

    The head's gradient is summed in float32. Compilers put off its cast, and what
    follows, until the layers' backward pass is over.
    """
    return values


def _together(_: None, gradients: Any) -> tuple[Any]:
    flat, tree = jax.tree.flatten(gradients, is_leaf=_is_zero)
    made = iter(jax.lax.optimization_barrier([g for g in flat if not _is_zero(g)]))
    return (tree.unflatten([None if _is_zero(g) else next(made) for g in flat]),)


def _is_zero(gradient: Any) -> bool:
    return isinstance(gradient, jax.custom_derivatives.SymbolicZero)


_gradients_together.defvjp(
    lambda values: (jax.tree.map(lambda one: one.value, values), None),
    _together,
    symbolic_zeros=True,
)


@jax.custom_vjp
def _before_its_gradient(loss: Array) -> Array:
    """The loss itself, made before the backward pass begins.

    Where the backward pass computes it again (`remat`, chunked losses) nothing waits
    for it, and compilers put it last: the head would stay gathered all the while.
    """
    return loss


_before_its_gradient.defvjp(
    lambda loss: (loss, loss),
    lambda loss, gradient: jax.lax.optimization_barrier((gradient, loss))[:1],
)
