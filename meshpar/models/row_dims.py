"""The dims of a layered model's activations that hold the rows of the batch."""

from typing import Any, NamedTuple

import jax

from meshpar.arrays import abstract
from meshpar.errors import LayoutError
from meshpar.models.layer_stack import LayeredModel, check_floating
from meshpar.models.row_values import RowTraces, row_values
from meshpar.replicated import num_rows
from meshpar.rows.values import Fixed, PerRow, is_value

NO_ROWS = -1


class RowDims(NamedTuple):
    """The dim of each array that holds rows; `NO_ROWS` for arrays without rows.

    Attributes:
      x: of activations between layers, a pytree as they are.
      context: of what all layers read.
    """

    x: Any
    context: Any


def row_dims(layered: LayeredModel, params: Any, batch: Any, why: str) -> RowDims:
    """Reads how activations depend on the rows of the batch, without compiling.

    Args:
      layered: the model.
      params: {path: anything with a shape and a dtype}.
      batch: pytree of arrays or ShapeDtypeStructs [batch, ...].
      why: setting that splits the rows, for errors.

    Raises:
      LayoutError: activations that mix rows, or that hold none.
    """
    shared = abstract(layered.split(params)[0])

    def made(params: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        return layered.embed(params, batch, key), layered.context(params, batch, key)

    key = jax.eval_shape(lambda: jax.random.key(0))
    whole = num_rows(batch)
    traces = RowTraces(made, shared, batch, key)
    x, context = row_values(traces, rows=[whole])
    check_floating(
        traces.of(whole)[1][0], f"{why} moves what `embed` returns between devices"
    )
    dims = RowDims(*(jax.tree.map(_dim, t, is_leaf=is_value) for t in (x, context)))
    for name, tree in dims._asdict().items():
        for keys, dim in jax.tree.leaves_with_path(tree):
            if dim is None or (name == "x" and dim == NO_ROWS):
                returns = "embed" if name == "x" else name
                at = jax.tree_util.keystr(keys)
                raise LayoutError(
                    f"{why} splits the rows of activations between devices, and the "
                    f"result of `{returns}`{at and f' at {at}'} has no dim that holds "
                    f"the rows alone; leave {why} out, or keep the rows in such a dim"
                )
    return dims


def _dim(value: Any) -> int | None:
    """The dim that holds rows; None where rows are mixed."""
    if isinstance(value, PerRow):
        return value.dim
    return NO_ROWS if isinstance(value, Fixed) else None
