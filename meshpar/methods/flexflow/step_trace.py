"""Traces the loss of a model and its gradients once, for every layout.

The trace runs on one device, on a mesh with one axis for each name of a dim. So the
constraints of the model's activations show the names that the model gave them, in place
of the axes of one layout.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from meshpar.arrays import Array, Params, is_key
from meshpar.errors import LayoutError
from meshpar.layouts.axes import AXES
from meshpar.layouts.layout import Layout
from meshpar.layouts.param import follows_load
from meshpar.layouts.rules import ACTIVATION_RULES
from meshpar.lowering.batches import abstract_batches
from meshpar.mesh.mesh import make_mesh
from meshpar.mesh.platform import CPU
from meshpar.methods.flexflow.graph import Graph
from meshpar.methods.flexflow.reader import read_graph
from meshpar.models.model import Model
from meshpar.models.model_scope import model_scope

_DIM, _PREFIX = "dim:", "activation_"


@dataclasses.dataclass(frozen=True, eq=False)
class _Naming(Layout):
    """A layout under which every name of a dim is an axis of its own."""

    @property
    def activation_rules(self) -> dict[str, tuple[str, ...]]:
        """{dim name: the axis that stands for it}."""
        return {name: (_DIM + _plain(name),) for name in super().activation_rules}


def _plain(name: str) -> str:
    """A name of a dim; Flax models write `activation_embed` for `embed`."""
    return name.removeprefix(_PREFIX)


def dim_name(axis: str) -> str | None:
    """The name for which an axis of a trace's mesh stands; None for an axis."""
    return axis.removeprefix(_DIM) if axis.startswith(_DIM) else None


def trace_step(
    model: Model, batch: Any, compute_dtype: Any, options: Mapping[str, Any]
) -> Graph:
    """The operators of the loss and its gradients, on one device.

    Args:
      model: the model.
      batch: abstract batch [batch, ...].
      compute_dtype: as in `meshpar.lower`.
      options: fields of layouts that change the trace, such as `remat`.

    Raises:
      LayoutError: the model names a dim that has no rule.
    """
    device = jax.devices(CPU.name)[0]
    layout = _Naming(**options)
    batch = abstract_batches(batch, Layout(), make_mesh(Layout(), [device]))[1]
    weights = {path: _weight(p, compute_dtype) for path, p in model.params.items()}
    trained = {path: weights[path] for path, p in model.params.items() if p.trained}
    rest = {path: w for path, w in weights.items() if path not in trained}
    key = jax.eval_shape(lambda: jax.random.key(0))

    def step(trained: Params, rest: Params, batch: Any, key: Array) -> Any:
        def loss(params: Params) -> tuple[Array, Any]:
            result = model.loss(rest | params, batch, key)
            return result.loss.astype(jnp.float32), result

        (value, result), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
        return value, gradients, result

    names = {_DIM + _plain(name) for name in ACTIVATION_RULES}
    names |= {axis for axes in layout.activation_rules.values() for axis in axes}
    axes = (*AXES, *sorted(names))
    mesh = Mesh(
        np.array([device]).reshape((1,) * len(axes)),
        axes,
        axis_types=(AxisType.Auto,) * len(axes),
    )
    with jax.set_mesh(mesh), model_scope(layout, mesh) as scope:
        jaxpr = jax.make_jaxpr(step)(trained, rest, batch, key)
    if unknown := layout_names(layout) - scope.names_used:
        raise LayoutError(
            f"rule activations.{sorted(unknown)[0]} matches no dim that the model "
            "constrains; leave it out"
        )
    paths = [*sorted(trained), *sorted(rest)]
    leaves = range(len(paths), len(paths) + len(jax.tree.leaves(batch)))
    return read_graph(
        jaxpr,
        {"params": {path: n for n, path in enumerate(paths)}, "batch": leaves},
        {"loss": 0, "gradients": {p: n for n, p in enumerate(sorted(trained), 1)}},
    )


def layout_names(layout: Layout) -> set[str]:
    """Names of dims of activations for which a layout has rules of its own."""
    return {name for name, _ in layout.activations}


def _weight(param: Any, compute_dtype: Any) -> jax.ShapeDtypeStruct:
    """A parameter as the loss computes with it (`layouts.resolve`)."""
    dtype, keeps = param.dtype, param.is_state or follows_load(param.names)
    floating = not is_key(param) and jnp.issubdtype(dtype, jnp.floating)
    if compute_dtype is not None and floating and not keeps:
        dtype = compute_dtype
    return jax.ShapeDtypeStruct(param.shape, dtype)
