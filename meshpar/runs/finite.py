"""Finite states: a state with a number that is none is not saved as a good one."""

from collections.abc import Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.arrays import Array
from meshpar.lowering.state import TrainState


class FiniteCheck:
    """Looks for numbers of a training state that are not finite, on its devices.

    Trained parameters and arrays of the optimizer must be finite. Other parameters and
    scalars of the optimizer may be infinite, as a best loss that is not known yet, but
    not NaN. Weights that travel between replicas are not looked at.
    """

    def __init__(self, mesh: Mesh, trained: Collection[str]):
        """Compiles nothing yet.

        Args:
          mesh: of the program.
          trained: paths of the trained parameters.
        """
        self._trained = frozenset(trained)
        whole = NamedSharding(mesh, PartitionSpec())
        self._all_good = jax.jit(_all_good, static_argnums=1, out_shardings=whole)

    def problem(self, state: TrainState) -> str:
        """The first tensor with such a number; "" if there is none.

        All processes of the program call it, and get the same.

        Args:
          state: in the order of the model, with or without replicas.
        """
        found = list(self._tensors(state))
        arrays = [x for _, x, _ in found]
        good = self._all_good(arrays, tuple(strict for *_, strict in found))
        names = (name for name, *_ in found)
        pairs = zip(names, good.tolist(), strict=True)
        return next((name for name, is_good in pairs if not is_good), "")

    def _tensors(self, state: TrainState) -> Iterator[tuple[str, Array, bool]]:
        """(name, array on the devices, whether it must be finite) of float tensors."""
        leaves = jax.tree_util.tree_leaves_with_path(state.optimizer_state)
        rows = [(path, x, path in self._trained) for path, x in state.params.items()]
        rows += [
            (f"optimizer state {jax.tree_util.keystr(path)}", x, jnp.ndim(x) > 0)
            for path, x in leaves
        ]
        for name, x, strict in rows:
            if jnp.issubdtype(jnp.result_type(x), jnp.floating):
                yield name, _on_device(x), strict


def _on_device(x: Any) -> Any:
    """The array in the memory of its devices, where it is in that of the host."""
    sharding = getattr(x, "sharding", None)
    default = sharding and next(iter(sharding.device_set)).default_memory().kind
    if sharding is None or sharding.memory_kind in (None, default):
        return x
    return jax.device_put(x, sharding.with_memory_kind(default))


def _all_good(arrays: list[Array], strict: tuple[bool, ...]) -> Array:
    if not arrays:
        return jnp.ones(0, bool)
    tests = {True: jnp.isfinite, False: lambda x: ~jnp.isnan(x)}
    pairs = zip(arrays, strict, strict=True)
    return jnp.stack([tests[is_strict](x).all() for x, is_strict in pairs])
