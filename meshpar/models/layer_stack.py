"""The layered form of a model: embed, a stack of equal layers, head with loss.

The shard_map lowering and pipelines hold one layer at a time. Users describe an NNX
model with `LayerStack`; `from_nnx` turns it into the pure functions of `LayeredModel`.
The whole loss is made from these functions, so that a model is written once.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.arrays import Array, Params
from meshpar.errors import LayoutError, MeshparError
from meshpar.mesh.order import computed, in_turn
from meshpar.metrics import LossResult, masked
from meshpar.models.scan_layers import Key, Layer, fold_key, scan_layers


@dataclasses.dataclass(frozen=True)
class LayerStack:
    """How to run an NNX module layer by layer.

    Attributes:
      stack: attribute path of the stacked layers, such as "blocks": a module whose
        every variable has the number of layers as its first dim (`nnx.vmap`).
      embed: (module, batch) -> x, any pytree of activations.
      layer: (one layer's module, x) -> x of the same shapes; with `context`,
        (one layer's module, x, what it returns) -> x.
      head_loss: (module, x, batch) -> loss or (loss, aux). The loss is a mean over
        rows, a `metrics.Mean(total, weight)` of two sums over rows, or any scalar with
        aux["weight"], its weight against the losses of other parts of the batch (its
        number of tokens, for example). A loss of weight 0 counts nothing, whatever its
        value. aux is a dict of metrics: numbers or arrays, means as the loss is, or
        `meshpar.metrics.Mean`, `Sum`, `Max` and `Last`.
      context: (module, batch) -> arrays that all layers read and that no gradient
        passes through, such as the positions of tokens; None for none.

    `embed` and `head_loss` may use every variable outside the stack. All three see one
    shard of the batch: a loop inside them (`lax.scan`) has to carry values that are
    computed from the activations, or to carry nothing.
    """

    stack: str
    embed: Callable[[Any, Any], Any]
    layer: Callable[..., Any]
    head_loss: Callable[[Any, Any, Any], Any]
    context: Callable[[Any, Any], Any] | None = None
    pattern: int = 1


EMBED_KEY, LAYERS_KEY, HEAD_KEY = 0, 1, 2
"""Numbers with which the key of a batch is folded for the parts of a model."""


def refuse_updates(updates: Params) -> None:
    """Refuses running state in a model that runs layer by layer.

    Raises:
      MeshparError: a part of the model changed a variable.
    """
    for path in updates:
        raise MeshparError(
            f"the model changes its variable {path!r} while it runs; models that run "
            "layer by layer keep no running state. Give the loss function alone, "
            "without layers: under data, fsdp and tensor the state is then that of the "
            "whole batch. Or use another layer (LayerNorm or GroupNorm in place of "
            "BatchNorm)"
        )


def check_floating(x: Any, moves: str) -> None:
    """Refuses activations that have no gradient to move back.

    Args:
      x: what `embed` returns.
      moves: the setting that moves it, and where to, for errors.

    Raises:
      LayoutError: it holds anything but floating-point arrays.
    """
    for leaf in jax.tree.leaves(x):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise LayoutError(
                f"{moves}, and gradients of it back, but it holds {leaf.dtype}: "
                "return floating-point activations alone"
            )


def _no_context(shared: Params, batch: Any, key: Key) -> tuple:
    del shared, batch, key
    return ()


def _none_kept(x: Any) -> tuple:
    del x
    return ()


@dataclasses.dataclass(frozen=True)
class LayeredModel:
    """A model as pure functions over {path: array}, layer by layer.

    `embed`, `context` and `head_loss` get the key of the batch, and `layer` one key of
    each layer (`LAYERS_KEY`).

    Attributes:
      prefix: first part of the paths of stacked parameters, such as "blocks/".
      depth: number of layers, the first dim of every stacked parameter.
      embed: (shared parameters, batch, key) -> x.
      layer: (parameters of one layer, x, key, context) -> x.
      head_loss: (shared parameters, x, batch, key) -> (loss, aux), by
        `loss_result`.
      context: (shared parameters, batch, key) -> arrays that all layers read and that
        no gradient passes through, such as masks and positions.
      kept: x -> activations in it that every layer passes on as they are, such as the
        output of an encoder; saved once and not for each layer.
      evaluates: whether evaluation runs these functions too, without a key; False if
        the model has an evaluation loss of its own.
      pattern: number of the model's own layers that one `layer` runs: the length of the
        pattern that repeats.
    """

    prefix: str
    depth: int
    embed: Callable[[Params, Any, Key], Any]
    layer: Layer
    head_loss: Callable[[Params, Any, Any, Key], LossResult]
    context: Callable[[Params, Any, Key], Any] = _no_context
    kept: Callable[[Any], tuple[Array, ...]] = _none_kept
    evaluates: bool = True
    pattern: int = 1

    def split(self, params: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(shared entries, entries of the stack) of {path: anything}."""
        shared, stack = {}, {}
        for path, x in params.items():
            (stack if path.startswith(self.prefix) else shared)[path] = x
        return shared, stack

    def read_by_head_alone(
        self, shared: Params, batch: Any, key: Key
    ) -> frozenset[str]:
        """Paths of the shared parameters that neither `embed` nor `context` reads.

        Args:
          shared: {path: array}.
          batch: as in `loss`.
          key: as in `loss`.
        """
        leaves, tree = jax.tree.flatten(shared)

        def read(*leaves: Array) -> Any:
            args = tree.unflatten(leaves), batch, key
            return self.embed(*args), self.context(*args)

        jaxpr = jax.make_jaxpr(read)(*leaves).jaxpr
        needed = set(map(id, jaxpr.outvars))
        for equation in reversed(jaxpr.eqns):
            if equation.effects or not needed.isdisjoint(map(id, equation.outvars)):
                needed |= set(map(id, equation.invars))
        pairs = zip(sorted(shared), jaxpr.invars, strict=True)
        return frozenset(path for path, x in pairs if id(x) not in needed)

    def loss(self, params: Params, batch: Any, key: Key) -> LossResult:
        """The loss of the whole model; its gradient is 0 where its weight is 0.

        Args:
          params: {path: array}.
          batch: the batch.
          key: random key, or None for evaluation.
        """
        shared, stack = self.split(params)
        x = self.embed(shared, batch, key)
        context = self.context(shared, batch, key)
        x = scan_layers(self.layer, stack, x, fold_key(key, LAYERS_KEY), context)
        return self.head(shared, x, batch, key)

    def head(self, shared: Params, x: Any, batch: Any, key: Key) -> LossResult:
        """The loss after the layers, whose backward pass begins when the head's ends.

        Args:
          shared: {path: array}.
          x: activations after the layers.
          batch: as in `loss`.
          key: as in `loss`.
        """
        x, shared, carrier = _join_gradients((x, shared, _carrier(x)))
        result = self.head_loss(shared, x, batch, key)
        loss, weight = result.loss, result.weight
        if weight is not None:
            loss = _carry_weight(loss, carrier, weight)
        return result._replace(loss=_before_backward(loss))


def _carrier(x: Any) -> Array:
    """A scalar 0 that varies over the manual axes of x.

    Nothing reads it: its gradient carries the weight of the loss into the backward
    pass (`_carry_weight`).
    """
    leaf, *_ = jax.tree.leaves(x)
    axes, zero = jax.typeof(leaf).manual_axis_type.varying, jnp.float32(0)
    return jax.lax.pcast(zero, tuple(sorted(axes)), to="varying") if axes else zero


def _carry_weight(loss: Array, carrier: Array, weight: Array) -> Array:
    """The loss itself; in the backward pass the weight is the carrier's gradient."""
    weight = jax.lax.stop_gradient(jnp.float32(weight) + carrier)
    return _with_carried(loss, carrier, weight)


@jax.custom_vjp
def _with_carried(loss: Array, carrier: Array, weight: Array) -> Array:
    del carrier, weight
    return loss


_with_carried.defvjp(
    lambda loss, carrier, weight: (loss, weight),
    lambda weight, gradient: (gradient, weight, jnp.zeros_like(weight)),
)


@jax.custom_vjp
def _join_gradients(values: tuple[Any, Any, Array]) -> tuple[Any, Any, Array]:
    """Identity whose backward pass finishes all gradients before any of them is used.

    The head's gradient is summed in float32. Without this barrier compilers delay its
    cast until the layers' backward pass is over.

    A loss that is divided by a weight of 0 has gradients that are not a number. If the
    gradient of the last value carries a weight of 0, all others become zeros.
    """
    return values


def _gradients_barrier(_: None, gradients: tuple[Any, Any, Array]) -> tuple[Any]:
    leaves, tree = jax.tree.flatten(gradients, is_leaf=_is_zero)
    weight = None if _is_zero(leaves[-1]) else leaves[-1]
    nonzero = [masked(weight, g) for g in leaves[:-1] if not _is_zero(g)]
    joined = iter(computed(nonzero))
    leaves = [None if _is_zero(g) else next(joined) for g in leaves[:-1]]
    return (tree.unflatten([*leaves, None]),)


def _is_zero(gradient: Any) -> bool:
    return isinstance(gradient, jax.custom_derivatives.SymbolicZero)


_join_gradients.defvjp(
    lambda values: (jax.tree.map(lambda primal: primal.value, values), None),
    _gradients_barrier,
    symbolic_zeros=True,
)


@jax.custom_vjp
def _before_backward(loss: Array) -> Array:
    """Identity that computes the loss before the backward pass begins.

    Without this barrier nothing waits for the loss where the backward pass computes it
    again (`remat`, loss blocks); compilers put it last and keep the head gathered.
    """
    return loss


def _wait_for_loss(loss: Array, gradient: Array) -> tuple[Array]:
    gradient, loss = computed((gradient, loss))
    return (in_turn(loss, gradient),)


_before_backward.defvjp(
    lambda loss: (loss, loss),
    _wait_for_loss,
)
