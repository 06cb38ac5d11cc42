"""A mixture of experts: route, dispatch, experts, combine, under the layout in use.

Every device routes its tokens, sends them to the devices that hold their experts and
gets the outputs back. `tensor` splits the mlp dim of every expert (`mlp_split`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.arrays import Array, vary
from meshpar.collectives.varying import sum_varying
from meshpar.contracts.purposes import purpose
from meshpar.errors import LayoutError
from meshpar.layouts import scope as scopes
from meshpar.layouts.axes import CONTEXT, EXPERT, TOKEN_AXES, in_use, ways_of
from meshpar.layouts.plan import Spec, partition_spec
from meshpar.layouts.scope import Scope, activation_axes, constrain, current_scope
from meshpar.layouts.stacks import place_of, standing
from meshpar.layouts.token_order import CONTIGUOUS
from meshpar.ops.experts.balance import load_term
from meshpar.ops.experts.capacity import Matmuls, run_with_capacity
from meshpar.ops.experts.config import DROPLESS, Experts, MixtureConfig
from meshpar.ops.experts.dropless import run_dropless
from meshpar.ops.experts.exchange import Exchange
from meshpar.ops.experts.mlp_split import MlpSplit
from meshpar.ops.experts.router import Routing, route
from meshpar.ops.experts.statistics import Lost, Statistics, statistics_of
from meshpar.rows.opaque import is_analysed, split_as_arguments

_CALL = "experts.mixture"


class Mixed(NamedTuple):
    """The result of a mixture of experts.

    Attributes:
      y: the outputs, in the dtype of the tokens.
      statistics: of all tokens of the batch.
      load: float32 choices of each expert, of all tokens of the batch.
    """

    y: Array
    statistics: Statistics
    load: Array


def mixture(
    x_BLD: Array,
    router_DE: Array,
    experts: Experts,
    config: MixtureConfig,
    *,
    activation: Callable[[Array], Array] = jax.nn.silu,
    bias_E: Array | None = None,
    key: Array | None = None,
) -> Mixed:
    """Runs each token through its experts.

    y = sum over the token's experts e of weight_e * mlp_e(x). Communication, forward:
    that of `run_with_capacity` or `run_dropless`, and of `statistics_of`.

    Args:
      x_BLD: tokens, whole along D.
      router_DE: the router's weights; name its dims ("embed", None).
      experts: the experts' weights.
      config: of the mixture.
      activation: of the gate, or of the first matrix without one.
      bias_E: as in `route`; name its dim "expert_load", and add `statistics.bias` to
        the loss, for `balanced` to train it.
      key: as in `route`.

    Raises:
      LayoutError: experts or their mlp dim do not divide over their axes.
    """
    if is_analysed():  # No part of a sequence divides its prime length.
        config = dataclasses.replace(config, group=0)
    fn = functools.partial(_mixture, config=config, activation=activation)
    return split_as_arguments(fn, x_BLD, router_DE, experts, bias_E, key)


def _mixture(
    x_BLD: Array,
    router_DE: Array,
    experts: Experts,
    bias_E: Array | None,
    key: Array | None,
    config: MixtureConfig,
    activation: Callable[[Array], Array],
) -> Mixed:
    routing = route(x_BLD, router_DE, config, bias_E=bias_E, key=key)
    mixed = _dispatched(x_BLD, routing, experts, config, activation)
    if bias_E is None:
        return mixed
    term = load_term(bias_E, mixed.load)
    return mixed._replace(statistics=mixed.statistics._replace(bias=term))


def _dispatched(
    x_BLD: Array,
    routing: Routing,
    experts: Experts,
    config: MixtureConfig,
    activation: Callable[[Array], Array],
) -> Mixed:
    """The mixture of routed tokens, under the layout in use."""
    scope = current_scope()
    if scope is None:
        return _OnShards(config, activation)(x_BLD, routing, experts)
    scope.experts_used.add(config)
    (mlp_axes,) = activation_axes(scope, ["mlp"], _CALL)
    sizes = scope.mesh.shape
    # Where they are all axes in use, no shard_map need be around those of the mlp dim.
    splits_alone = ways_of(mlp_axes, sizes) == scope.mesh.size > 1
    if scope.manual_axes or splits_alone:
        # In the order of the mesh: the order of a set differs between processes.
        token_axes = in_use((a for a in TOKEN_AXES if a in scope.manual_axes), sizes)
        ways = config.num_experts // len(experts.up)
        _check_divides(experts, config, ways, mlp_axes, scope)
        run = _OnShards(config, activation, token_axes, ways, varies=True)
        split = MlpSplit.of(scope, x_BLD, mlp_axes, _CALL)
        x_BLD = x_BLD if split else constrain(x_BLD, "batch", "length", "embed")
        return run(x_BLD, routing, experts, split)
    x_BLD = constrain(x_BLD, "batch", "length", "embed")
    split = _split_tokens(x_BLD, scope)
    if split is None:
        # A few sequences, such as a sample: the compiler splits what it can.
        return _OnShards(config, activation)(x_BLD, routing, experts)
    token_axes, ways = tuple(itertools.chain(*split)), sizes[EXPERT]
    _check_divides(experts, config, ways, mlp_axes, scope)
    run = _OnShards(config, activation, token_axes, ways, mlp_axes)
    return _on_shards(run, x_BLD, routing, experts, scope, partition_spec(split))


def _split_tokens(x_BLD: Array, scope: Scope) -> Spec | None:
    """The axes that split rows and length under lowering=jit; None if not evenly."""
    split = activation_axes(scope, ["batch", "length"], _CALL)
    batch_ways, length_ways = (ways_of(axes, scope.mesh.shape) for axes in split)
    shares_experts = in_use((EXPERT,), scope.mesh.shape)
    if len(x_BLD) % batch_ways or not {*shares_experts} <= {*split[0]}:
        return None
    by_context = split[1] == (CONTEXT,) and x_BLD.shape[1] % length_ways == 0
    return split if by_context else (split[0], ())


def _check_divides(
    experts: Experts,
    config: MixtureConfig,
    ways: int,
    mlp_axes: tuple[str, ...],
    scope: Scope,
) -> None:
    """Raises LayoutError if the experts or their mlp dim do not divide."""
    mlp, mlp_ways = experts.up.shape[-1], ways_of(mlp_axes, scope.mesh.shape)
    if config.num_experts % ways:
        raise LayoutError(
            f"{_CALL}: num_experts={config.num_experts} does not divide over "
            f"{EXPERT}={ways}; change either"
        )
    if mlp % mlp_ways:
        raise LayoutError(
            f"{_CALL}: mlp={mlp} does not divide over {'*'.join(mlp_axes)}="
            f"{mlp_ways}; change the size, or set activations.mlp=none and "
            "params.mlp=none"
        )


def _on_shards(
    run: "_OnShards",
    x_BLD: Array,
    routing: Routing,
    experts: Experts,
    scope: Scope,
    tokens: PartitionSpec,
) -> Mixed:
    """Runs a mixture under lowering=jit, with all axes manual inside."""
    sizes = scope.mesh.shape
    if not in_use(sizes, sizes):
        return run(x_BLD, routing, experts)
    by_expert = in_use((EXPERT,), sizes)
    up = partition_spec((by_expert, (), run.mlp_axes))
    down = partition_spec((by_expert, run.mlp_axes, ()))
    gate = None if experts.gate is None else up

    def on_one_device(x_BLD: Array, routing: Routing, experts: Experts) -> Mixed:
        if CONTEXT not in run.token_axes:
            return run(x_BLD, routing, experts)
        # Whole sequences are in their own order.
        layout = dataclasses.replace(scope.layout, context_order=CONTIGUOUS)
        with scopes.use(layout, scope.mesh, scope.mesh.axis_names):
            return run(x_BLD, routing, experts)

    return jax.shard_map(
        on_one_device,
        mesh=scope.mesh,
        in_specs=(tokens, tokens, Experts(up, down, gate)),
        out_specs=Mixed(tokens, PartitionSpec(), PartitionSpec()),
    )(x_BLD, routing, experts)


@dataclasses.dataclass(frozen=True)
class _OnShards:
    """Dispatch, experts and combine for the tokens of one device.

    Attributes:
      config: of the mixture.
      activation: of the experts.
      token_axes: manual axes that split the tokens.
      ways: devices that share the experts.
      mlp_axes: manual axes that split the experts' mlp dim.
      varies: as in `statistics_of`; a pipeline saves residuals in buffers, whose values
        all vary.
    """

    config: MixtureConfig
    activation: Callable[[Array], Array]
    token_axes: tuple[str, ...] = ()
    ways: int = 1
    mlp_axes: tuple[str, ...] = ()
    varies: bool = False

    def __call__(
        self,
        x_BLD: Array,
        routing: Routing,
        experts: Experts,
        split: MlpSplit | None = None,
    ) -> Mixed:
        """The outputs of this device's tokens, and statistics of all tokens."""
        axes = *self.token_axes, *self.mlp_axes
        x, weights, *matrices = (
            None if x is None else vary(x, axes)
            for x in (x_BLD, routing.weights, *experts)
        )
        args = x, routing.experts, weights, Experts(*matrices)
        places = [place and place.varying(axes) for place in map(place_of, experts)]
        with standing(zip(matrices, places, strict=True)):
            run = functools.partial(split.run, self.outputs) if split else self.outputs
            y_BLD, lost = run(*args)
        result = statistics_of(routing, lost, self.token_axes, self.ways, self.varies)
        return Mixed(y_BLD, *result)

    def outputs(
        self, x_BLD: Array, experts_BLX: Array, weights_BLX: Array, experts: Experts
    ) -> tuple[Array, Lost]:
        """(outputs of this device's tokens, the lost choices)."""
        config = self.config
        x_TD = x_BLD.reshape(-1, x_BLD.shape[-1])
        weights_TX = weights_BLX.reshape(-1, config.experts_per_token)
        run = functools.partial(self._experts, experts)
        dispatched = run_dropless if config.routing == DROPLESS else run_with_capacity
        exchange = Exchange(self.ways)
        y_TD, lost = dispatched(x_TD, experts_BLX, weights_TX, config, exchange, run)
        with purpose("outputs of experts, summed over their mlp dim"):
            for axis in self.mlp_axes:
                y_TD = sum_varying(y_TD, axis)
        return y_TD.reshape(x_BLD.shape), lost

    def _experts(
        self, experts: Experts, rows: Array, weights: Array, matmuls: Matmuls
    ) -> Array:
        """Outputs of the experts times the weights of their rows.

        Weights come before the last matrix: its output is not needed in the backward
        pass then, and is neither saved nor sent again.
        """
        into = [w for w in (experts.up, experts.gate) if w is not None]
        hidden = self._weighted(*matmuls(rows, *into), weights=weights)
        (y,) = matmuls(hidden, experts.down)
        return y

    @functools.partial(jax.checkpoint, static_argnums=0, prevent_cse=False)
    def _weighted(
        self, up: Array, gate: Array | None = None, *, weights: Array
    ) -> Array:
        """Hidden activations times the weights of their rows.

        The backward pass computes them again: five arrays more would be saved.
        """
        h = self.activation(up) if gate is None else self.activation(gate) * up
        return (h.astype(jnp.float32) * weights[..., None]).astype(h.dtype)
