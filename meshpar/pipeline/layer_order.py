"""The order in which a pipeline stores its layers, and the model's own.

Stages hold several chunks, or unequal numbers of layers, so a stack is stored in
another order than the model's, and with padding (`partition.Partition`). Training runs
on arrays as stored; checkpoints, comparisons and models that are used have the model's
order, so nothing outside a program depends on its layout.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey, tree_map_with_path

from meshpar.arrays import Params
from meshpar.errors import LayoutError
from meshpar.models.model import Model
from meshpar.pipeline.partition import Partition


@dataclasses.dataclass(frozen=True)
class LayerOrder:
    """Turns trees of parameters between the two orders.

    Attributes:
      partition: which layers every stage holds.
      prefix: what the paths of stacked parameters begin with.
    """

    partition: Partition
    prefix: str

    def _mapped(self, fn: Callable[[Any], Any], tree: Any, length: int) -> Any:
        """Applies fn to every leaf [length, ...] below the path of a stacked tensor."""

        def one(keys: Any, leaf: Any) -> Any:
            paths = [key.key for key in keys if isinstance(key, DictKey)]
            ours = any(str(path).startswith(self.prefix) for path in paths)
            return fn(leaf) if ours and leaf.shape[:1] == (length,) else leaf

        return tree_map_with_path(one, tree)

    def in_model_order(self, tree: Any) -> Any:
        """Leaves [depth, ...] from leaves as stored."""
        return self._mapped(self.partition.restore, tree, len(self.partition.order))

    def as_stored(self, tree: Any) -> Any:
        """Leaves as stored from leaves [depth, ...]."""
        return self._mapped(self.partition.store, tree, self.partition.depth)

    def abstract_in_model_order(self, tree: Any) -> Any:
        """The same of ShapeDtypeStructs; `pipe` splits the depth if it divides it."""
        depth = self.partition.depth

        def one(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            sharding = leaf.sharding
            if depth % self.partition.num_stages:
                spec = PartitionSpec(None, *sharding.spec[1:])
                sharding = NamedSharding(sharding.mesh, spec)
            return leaf.update(shape=(depth, *leaf.shape[1:]), sharding=sharding)

        return self._mapped(one, tree, len(self.partition.order))

    def check_optimizer(self, state: Any, params: Params) -> None:
        """Refuses optimizers that mix layers, which padding would change.

        Raises:
          LayoutError: a leaf of the optimizer state that belongs to a stacked tensor
            and has another shape than it.
        """

        def one(keys: Any, leaf: Any) -> None:
            for key in keys:
                path = key.key if isinstance(key, DictKey) else ""
                if path in params and str(path).startswith(self.prefix):
                    if leaf.shape not in ((), params[path].shape):
                        raise LayoutError(
                            f"the optimizer keeps {leaf.shape} for {path} "
                            f"{params[path].shape}: it mixes layers, and this "
                            "pipeline stores them in another order or padded; use "
                            "schedule=1f1b with a depth that pipe divides"
                        )

        tree_map_with_path(one, state)

    def stored(self, model: Model) -> Model:
        """The model whose parameters are as stored."""
        rows = len(self.partition.order)
        params = {
            path: dataclasses.replace(param, shape=(rows, *param.shape[1:]))
            if path.startswith(self.prefix)
            else param
            for path, param in model.params.items()
        }
        back = self.in_model_order
        return dataclasses.replace(
            model,
            params=params,
            init=lambda key: self.as_stored(model.init(key)),
            loss=lambda params, batch, key: model.loss(back(params), batch, key),
            evaluation_loss=lambda params, batch: model.evaluation_loss(
                back(params), batch
            ),
            bind=lambda params: model.bind(back(params)),
        )
