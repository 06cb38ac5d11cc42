"""Collectives of one layer, such as of tokens to their experts, read from its jaxpr.

The layer and its backward pass are traced once, on the shapes of one device's
microbatch. Planners multiply what it writes by the passes over the layers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.arrays import Array, Params, abstract, abstract_layer, vary
from meshpar.contracts.declared import DeclaredCollective
from meshpar.contracts.written import (
    WrittenCollective,
    written_collectives,
    written_terms,
)
from meshpar.fsdp.terms import LayerPass, weight_reading
from meshpar.jaxprs.live_code import with_results
from meshpar.layouts.axes import CONTEXT, EXPERT
from meshpar.layouts.layer_uses import policies
from meshpar.layouts.layout import Layout
from meshpar.layouts.plan import partition_spec
from meshpar.lowering.batches import batch_specs
from meshpar.lowering.frame import Frame
from meshpar.lowering.layer_trace import written_layer

_AXES = {EXPERT, CONTEXT}
"""Axes along which layers move activations themselves."""


def layer_collectives(
    frame: Frame, batch: Any, remats: Iterable[str]
) -> Callable[[str, bool], list[WrittenCollective]]:
    """Collectives of one layer over `expert` and `context`, forward and backward.

    Args:
      frame: the shard_map program.
      batch: abstract batch of one replica.
      remats: policies of the layer.

    Returns:
      A function from a policy, and whether the layer's output is read beside its
      gradients, to collectives. It reads the jaxpr of all policies, traced here.
    """
    sizes, widens = dict(frame.mesh.shape), frame.transports.widens
    remats = tuple(remats)
    jaxpr = _jaxpr(frame, batch, remats)

    def collectives(remat: str, output: bool) -> list[WrittenCollective]:
        wanted = [own == remat and read for own in remats for read in (True, output)]
        every = written_collectives(with_results(jaxpr, wanted), sizes, widens)
        return [move for move in every if _AXES & set(move.axes)]

    return collectives


def _jaxpr(frame: Frame, batch: Any, remats: Sequence[str]) -> Any:
    """The closed jaxpr of one layer, forward and backward, under each policy.

    Takes the arguments of `layer_collectives`. Its results are the sum of the layer's
    gradients and that of its output, policy by policy.
    """
    num, layered = frame.layout.microbatches, frame.layered
    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // num, *x.shape[1:]), x.dtype),
        batch,
    )
    shared, stack = layered.split(abstract(frame.plan.weights))
    specs = {path: partition_spec(held) for path, held in frame.held.items()}
    layer_specs = {path: PartitionSpec(*specs[path][1:]) for path in stack}
    trained = frame.plan.gradients

    def run(shared: Params, weights: Params, rows: Any) -> list[Array]:
        with frame.scope():
            x = jax.tree.map(frame.vary, layered.embed(shared, rows, None))
            context = layered.context(shared, rows, None)
            weights = jax.tree.map(frame.vary, weights)
            own = {path: w for path, w in weights.items() if path in trained}
            under, _ = written_layer(layered.layer, weights, x, None, context)

            def passes(remat: str) -> tuple[Any, Any]:
                def layer(own: Params, x: Any) -> Any:
                    y = under(remat)(weights | own, x, None, context)
                    return jax.tree.map(frame.vary, y)

                y, vjp = jax.vjp(layer, own, x)
                return vjp(jax.tree.map(jnp.ones_like, y)), y

            read = [result for remat in remats for result in passes(remat)]
        totals = (sum(map(jnp.sum, jax.tree.leaves(result))) for result in read)
        return [vary(total, frame.manual_axes)[None] for total in totals]

    with jax.set_mesh(frame.mesh):
        mapped = jax.shard_map(
            run,
            in_specs=(
                {path: specs[path] for path in shared},
                layer_specs,
                batch_specs(frame.layout, rows, frame.batch_axes),
            ),
            out_specs=PartitionSpec(frame.manual_axes),
            axis_names=set(frame.manual_axes),
        )
        return jax.make_jaxpr(mapped)(shared, abstract_layer(stack), rows)


def layers_terms(
    layout: Layout, passes: Sequence[LayerPass], of_policy: Any
) -> Iterator[DeclaredCollective]:
    """Collectives of all layers over `expert` and `context` in one step.

    Args:
      layout: of the step.
      passes: all passes over the layers.
      of_policy: a function from a policy, and whether the output is read, to its
        `layer_collectives`.
    """
    for one in weight_reading(passes):
        stack = policies(layout.layers, layout.remat, one.depth)
        for i, (policy, depth) in enumerate(stack):
            backward = one.name == "backward"
            # Nothing reads the output of a last layer that runs again. A scan of
            # several layers computes all of their outputs alike.
            last = one.name == "forward again" and i == len(stack) - 1 and depth == 1
            moves = of_policy(policy, not last)
            own = (x for x in moves if x.backward == backward)
            yield from written_terms(own, times=one.runs * depth)
