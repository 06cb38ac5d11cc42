"""Converts stacked parameters between the model's order and a pipeline's.

If stages hold several chunks or unequal numbers of layers, a pipeline stores a stack
in another order than the model's, and with padding (`partition.Partition`). Training
runs on arrays as stored. Checkpoints, comparisons and bound models have the model's
order, so that nothing outside a program depends on its layout.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey, tree_map_with_path

from meshpar.arrays import Params, parameter_path, stack_of_row
from meshpar.errors import LayoutError
from meshpar.lowering.optimizer import Optimizer
from meshpar.models.model import Model
from meshpar.pipeline.moved_update import moved_update
from meshpar.pipeline.partition import Partition


@dataclasses.dataclass(frozen=True)
class LayerOrder:
    """Converts trees of parameters between the two orders.

    Attributes:
      partition: the layers of every stage.
      prefix: the first part of the paths of stacked parameters.
    """

    partition: Partition
    prefix: str

    def _map_stacked(self, fn: Callable[[Any], Any], tree: Any, length: int) -> Any:
        """Applies fn to every leaf [length, ...] below the path of a stacked tensor."""

        def convert(keys: Any, leaf: Any) -> Any:
            paths = [key.key for key in keys if isinstance(key, DictKey)]
            stacked = any(
                str(path).startswith(self.prefix) and not stack_of_row(path)
                for path in paths
            )
            return fn(leaf) if stacked and leaf.shape[:1] == (length,) else leaf

        return tree_map_with_path(convert, tree)

    def in_model_order(self, tree: Any) -> Any:
        """Leaves [depth, ...] from leaves as stored."""
        rows = len(self.partition.order)
        return self._map_stacked(self.partition.restore, tree, rows)

    def as_stored(self, tree: Any) -> Any:
        """Leaves as stored from leaves [depth, ...]."""
        return self._map_stacked(self.partition.store, tree, self.partition.depth)

    def abstract_in_model_order(self, tree: Any) -> Any:
        """ShapeDtypeStructs [depth, ...] from the structs of stored leaves.

        `pipe` splits the depth if it divides it; otherwise each stage has all layers.
        """
        depth = self.partition.depth

        def convert(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            sharding = leaf.sharding
            if depth % self.partition.num_stages:
                spec = PartitionSpec(None, *sharding.spec[1:])
                sharding = NamedSharding(sharding.mesh, spec)
            return leaf.update(shape=(depth, *leaf.shape[1:]), sharding=sharding)

        return self._map_stacked(convert, tree, len(self.partition.order))

    def check_optimizer(self, optimizer: Optimizer, params: Params) -> None:
        """Refuses optimizers whose updates depend on the order, or on padding.

        Args:
          optimizer: of the parameters as stored.
          params: the parameters as stored, as ShapeDtypeStructs.

        Raises:
          LayoutError: a leaf of the optimizer state belongs to a stacked tensor and
            has neither its shape nor is a scalar; or layers as stored get other
            updates than in the order of the model.
        """
        if optimizer.rows.rows:
            return  # It sees the model's own layers, in their order.
        stack = [path for path in params if path.startswith(self.prefix)]
        remedy = "use schedule=1f1b with a depth that pipe divides"

        def check(keys: Any, leaf: Any) -> None:
            path = parameter_path(keys, stack)
            if path is not None and leaf.shape not in ((), params[path].shape):
                raise LayoutError(
                    f"the optimizer keeps {leaf.shape} for {path} "
                    f"{params[path].shape}: it mixes layers, and this pipeline stores "
                    f"them in another order or padded; {remedy}"
                )

        tree_map_with_path(check, optimizer.abstract_state)
        if path := moved_update(optimizer, params, stack, self.partition):
            raise LayoutError(
                f"the optimizer gives {path} other updates if its layers are stored in "
                "another order or padded, as this pipeline does: it draws random "
                f"numbers, or depends on the number of elements; {remedy}, or an "
                "elementwise optimizer"
            )

    def stored(self, model: Model) -> Model:
        """The model with parameters as stored."""
        rows = len(self.partition.order)
        params = {
            path: dataclasses.replace(param, shape=(rows, *param.shape[1:]))
            if path.startswith(self.prefix)
            else param
            for path, param in model.params.items()
        }
        restore = self.in_model_order
        return dataclasses.replace(
            model,
            params=params,
            rows={
                path: tuple(None if i < 0 else rows[i] for i in self.partition.order)
                for path, rows in model.rows.items()
            },
            init=lambda key: self.as_stored(model.init(key)),
            loss=lambda params, batch, key: model.loss(restore(params), batch, key),
            evaluation_loss=lambda params, batch: model.evaluation_loss(
                restore(params), batch
            ),
            bind=lambda params: model.bind(restore(params)),
        )
