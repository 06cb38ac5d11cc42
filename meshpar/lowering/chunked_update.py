"""The optimizer's update layer by layer, for state that lives in host memory.

State of one layer comes to the device, is updated with that layer's gradients, and goes
back, in a loop over the layers. A compiler fetches one layer while it computes another,
so about two of them are on the device at a time. If the whole state were fetched for
one update, nothing would be saved at the peak. What belongs to no layer is updated
after them, as a whole.

Source: Ren et al., ZeRO-Offload, arXiv:2101.06840, section 4 (the state in host memory;
  there the CPU computes the update, here the device does).
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from meshpar.arrays import Array, Params, parameter_path, to_device, to_host
from meshpar.contracts.host_transfers import HostTransfer
from meshpar.errors import LayoutError
from meshpar.layouts.host_leaves import with_host_leaves
from meshpar.layouts.offload import PARAMETERS
from meshpar.layouts.plan import Plan
from meshpar.lowering.layer_update import MODEL
from meshpar.lowering.optimizer import Optimizer
from meshpar.mesh.order import computed
from meshpar.models.model import Model

_REMEDY = "use an elementwise optimizer, such as optax.adamw, or leave offload out"


def check_layerwise(optimizer: Optimizer, params: Params, offload: str) -> None:
    """Refuses optimizers whose update of one layer depends on more than that layer.

    Args:
      optimizer: the optimizer.
      params: the layers' parameters that it trains, stacked, with their shapes.
      offload: the value of `offload=`, for messages.

    Raises:
      LayoutError: the update or the state of one layer depends on other layers or
        tensors, or on its place among the layers.
    """
    reach, text = optimizer.reach, f"offload={offload} updates layer by layer, and"
    if optimizer.layers == MODEL:
        raise LayoutError(
            f"{text} the optimizer treats layers differently (labels, masks or rates "
            "by layer): leave offload out"
        )
    if reach.crossed:
        raise LayoutError(
            f"{text} the optimizer's update of {min(reach.crossed)} depends on other "
            "tensors: clip with lower(clip_norm=...) in place of "
            f"optax.clip_by_global_norm, {_REMEDY}"
        )
    if mixed := reach.mixed & params.keys():
        raise LayoutError(
            f"{text} an element of the optimizer's update of {min(mixed)} depends on "
            f"others of the tensor: {_REMEDY}"
        )
    if reach.positional or reach.summarizes:
        kept = "draws random numbers" if reach.positional else "keeps sums over tensors"
        raise LayoutError(f"{text} the optimizer {kept}: {_REMEDY}")
    leaves = jax.tree_util.tree_flatten_with_path(optimizer.abstract_state)[0]
    for keys, leaf in leaves:
        path = parameter_path(keys, params)
        if path is not None and leaf.shape not in ((), params[path].shape):
            raise LayoutError(
                f"{text} the optimizer keeps {leaf.shape} for {path} "
                f"{params[path].shape}: {_REMEDY}"
            )


def offloaded_plan(plan: Plan, model: Model, optimizer: Optimizer) -> Plan:
    """A plan with the state in host memory that `offload=` of its layout names.

    Args:
      plan: as `make_plan` makes it.
      model: with layers.
      optimizer: updates each layer by itself.

    Raises:
      LayoutError: it does not.
    """
    stack = model.layered.split(model.params)[1]
    trained = {path: param for path, param in stack.items() if param.trained}
    check_layerwise(optimizer, trained, plan.layout.offload)
    return with_host_leaves(plan, optimizer.abstract_state, stack)


def state_transfers(plan: Plan) -> Iterator[HostTransfer]:
    """Transfers between one device and host memory for the update of one step."""
    sizes = plan.host_bytes()
    for kind, size in sizes.items():
        if size:
            yield HostTransfer(f"{kind}, updated layer by layer", size, size)
    if (size := sizes["parameters"]) and PARAMETERS not in plan.layout.offloaded:
        yield HostTransfer("copies of the weights, once a step", size, 0)


class _Leaf(NamedTuple):
    """How one tensor takes part in an update.

    Attributes:
      layers: whether it is a stack of layers.
      tensor: whether it belongs to a parameter, as counters do not.
      on_host: whether it lives in host memory.
    """

    layers: bool
    tensor: bool
    on_host: bool

    def fetch(self, x: Array) -> Array:
        """The tensor, or a part of it, on the device."""
        return to_device(x) if self.on_host else x

    def put_back(self, x: Array) -> Array:
        """The tensor, or a part of it, where it lives."""
        return to_host(x) if self.on_host else x


@dataclasses.dataclass(frozen=True)
class ChunkedUpdate:
    """Updates parameters and optimizer state in chunks of one layer.

    Attributes:
      optimizer: updates each layer by itself (`check_layerwise`).
      plan: says what lives in host memory.
      stack: paths of the layers' parameters.
    """

    optimizer: Optimizer
    plan: Plan
    stack: Collection[str]

    def run(
        self,
        grads: Params,
        state: Any,
        params: Params,
        finish: Callable[[Params, Any], Params],
        scalars: Any,
        loss: Array,
    ) -> tuple[Params, Any]:
        """(parameters, state) after one step.

        Args:
          grads: {path: gradient}.
          state: the optimizer state.
          params: {path: array} of the parameters that are trained.
          finish: (gradients, scalars) -> the gradients that the optimizer gets, element
            by element; it runs on each chunk.
          scalars: arrays that `finish` needs.
          loss: the loss of `grads`.
        """
        kept, structure = jax.tree.flatten((params, state))
        leaves = self._leaves(params, state)

        def update(chunk: list[Array], grads: Params, scalars: Any) -> list[Array]:
            scalars, loss = scalars
            params, state = structure.unflatten(chunk)
            grads = finish(grads, scalars)
            updates, state = self.optimizer.update(grads, state, params, loss)
            new = jax.tree.leaves((optax.apply_updates(params, updates), state))
            return [leaf.put_back(x) for leaf, x in zip(leaves, new, strict=True)]

        def update_layer(i: Array, stacks: dict[int, Array]) -> dict[int, Array]:
            def row(x: Array) -> Array:
                return lax.dynamic_index_in_dim(x, i, keepdims=True)

            def part(number: int, x: Array) -> Array:
                leaf = leaves[number]
                if leaf.layers:
                    return leaf.fetch(row(stacks[number]))
                return _blank(x) if leaf.tensor else _as_in_loop(x)

            chunk = [part(number, x) for number, x in enumerate(kept)]
            rows = {
                p: row(x) if p in self.stack else _blank(x) for p, x in grads.items()
            }
            new = update(chunk, rows, _as_in_loop((scalars, loss)))
            return {
                number: lax.dynamic_update_index_in_dim(x, new[number], i, 0)
                for number, x in stacks.items()
            }

        stacks = {n: x for n, x in enumerate(kept) if leaves[n].layers}
        depth = min((len(x) for x in stacks.values()), default=0)
        stacks = lax.fori_loop(0, depth, update_layer, stacks)
        chunk = [
            _blank(x[:1]) if leaf.layers else leaf.fetch(x)
            for leaf, x in zip(leaves, kept, strict=True)
        ]
        rest = {p: _blank(x[:1]) if p in self.stack else x for p, x in grads.items()}
        new = dict(enumerate(update(chunk, rest, (scalars, loss)))) | stacks
        return structure.unflatten(new.values())

    def _leaves(self, params: Params, state: Any) -> list[_Leaf]:
        """How every tensor of (params, state) takes part, in the order of the tree."""
        plans = [self.plan.parameters[path] for path in sorted(params)]
        flat = jax.tree_util.tree_flatten_with_path((params, state))[0]
        leaves = []
        for (keys, x), plan in zip(flat, (*plans, *self.plan.optimizer), strict=True):
            path = parameter_path(keys, params) if x.shape else None
            leaves.append(_Leaf(path in self.stack, path is not None, plan.on_host))
        return leaves


def _blank(x: Array) -> Array:
    """Zeros in place of a tensor that is not updated now; nothing reads the result."""
    return jnp.zeros(x.shape, x.dtype)


def _as_in_loop(scalars: Any) -> Any:
    """Scalars that enter a loop, as if they were computed in it.

    XLA:CPU divides by a scalar that enters a loop and multiplies by the reciprocal of
    any other one, and the results would differ from those without a loop.
    """
    return computed(scalars)
