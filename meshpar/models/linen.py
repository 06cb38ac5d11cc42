"""Flax Linen models: `from_linen`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util

from meshpar.arrays import Array, Params
from meshpar.layouts.param import Param
from meshpar.models.metrics import LossResult, loss_result
from meshpar.models.model import Model, checked_params


@dataclasses.dataclass(frozen=True, eq=False)
class _LinenFunctions:
    """A Linen module as functions of its parameters.

    Attributes:
      module: the module.
      args: positional example inputs; shapes will do.
      kwargs: example inputs by keyword.
      rngs: names of the random streams during training.
    """

    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    rngs: tuple[str, ...]

    def _variables(self, key: Array) -> Any:
        keys = jax.random.split(key, 1 + len(self.rngs))
        rngs = dict(zip(("params", *self.rngs), keys, strict=True))
        args, kwargs = jax.tree.map(_zeros, (self.args, self.kwargs))
        return self.module.init(rngs, *args, **kwargs)

    def params(self) -> dict[str, Param]:
        """{path: Param} of the module."""
        variables = jax.eval_shape(self._variables, jax.random.key(0))
        if others := sorted(set(variables) - {"params"}):
            raise ValueError(
                f"the module keeps collections {others} beside 'params'; meshpar "
                "trains models without running state (LayerNorm or GroupNorm in place "
                "of BatchNorm)"
            )
        leaves = traverse_util.flatten_dict(variables.get("params", {}), sep="/")
        return checked_params({path: _param(leaf) for path, leaf in leaves.items()})

    def init(self, key: Array) -> Params:
        """Parameters from a random key."""
        tree = nn.meta.unbox(self._variables(key)["params"])
        return traverse_util.flatten_dict(tree, sep="/")

    def bind(self, params: Params, key: Array | None = None) -> Callable:
        """The module's `apply` with these parameters; random streams need a key."""
        tree = traverse_util.unflatten_dict(params, sep="/")

        def apply(*args: Any, **kwargs: Any) -> Any:
            if key is not None:
                keys = jax.random.split(key, max(1, len(self.rngs)))
                kwargs.setdefault("rngs", dict(zip(self.rngs, keys, strict=False)))
            return self.module.apply({"params": tree}, *args, **kwargs)

        return apply


def _zeros(leaf: Any) -> Any:
    return jnp.zeros(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf


def _param(leaf: Any) -> Param:
    """The Param of a variable, which Linen may have boxed with its dim names."""
    boxed = isinstance(leaf, nn.meta.AxisMetadata)
    names = getattr(leaf, "names", None) if boxed else None
    x = nn.meta.unbox(leaf)
    return Param(x.shape, x.dtype, None if names is None else tuple(names))


def from_linen(
    module: nn.Module,
    loss_fn: Callable[[Callable, Any], Any],
    example_inputs: Any,
    evaluation_loss_fn: Callable[[Callable, Any], Any] | None = None,
    rngs: tuple[str, ...] = ("dropout",),
) -> Model:
    """Makes a `Model` of a Linen module.

    Dim names are those of `nn.with_logical_partitioning` or `nn.with_partitioning`.

    Args:
      module: the Linen module.
      loss_fn: (apply, batch) -> loss or (loss, aux), where `apply(*args, **kwargs)`
        runs the module with its parameters and random keys. The loss is a mean over
        rows, a `meshpar.Mean(total, weight)`, or a scalar with aux["weight"], its
        weight against the losses of other parts of the batch. aux is a dict of metrics:
        scalars that are means as the loss is, or `meshpar.Mean`, `Sum`, `Max`, `Last`.
      example_inputs: arguments of `module.init` after the key: a tuple of positional
        arguments, a dict of keyword arguments or one array; shapes will do.
      evaluation_loss_fn: (apply, batch) -> loss or (loss, aux) for evaluation, where
        `apply` has no random keys; `loss_fn` by default.
      rngs: names of the random streams that `apply` gets during training.

    Raises:
      ValueError: the module keeps other variables than parameters, has no parameters,
        or gives one more names than dims.
    """
    args, kwargs = (), {}
    if isinstance(example_inputs, Mapping):
        kwargs = dict(example_inputs)
    elif isinstance(example_inputs, tuple):
        args = example_inputs
    else:
        args = (example_inputs,)
    functions = _LinenFunctions(module, args, kwargs, rngs)

    def loss(params: Params, batch: Any, key: Array) -> LossResult:
        return loss_result(loss_fn(functions.bind(params, key), batch))

    def evaluation_loss(params: Params, batch: Any) -> LossResult:
        apply = functions.bind(params)
        return loss_result((evaluation_loss_fn or loss_fn)(apply, batch))

    return Model(
        functions.params(), functions.init, loss, evaluation_loss, functions.bind
    )
