"""PipeDream's partitioner: layers into replicated stages, from a profile.

The profile has the seconds, the activation and the weights of each layer. A stage of
layers i..j on m machines takes, per minibatch,

    T(i..j, m) = max(seconds of the layers, 2 (m-1)/m weights / bandwidth) / m

because m minibatches are at work at once and the sum of their gradients, one
all_reduce, travels beside the next ones. (The paper has a parameter server in its
place.) Between stages the activation goes forward and its gradient back. The slowest
stage or link sets the pace, and a dynamic program finds where it is fastest:

    A(j, m) = min(T(1..j, m), min over i, m' of max(A(i, m-m'), 2 a_i / bandwidth,
                                                    T(i+1..j, m')))

Source: Narayanan et al., PipeDream, SOSP 2019, section 3.1, with one level of links.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from meshpar.arrays import num_bytes
from meshpar.errors import MeshparError
from meshpar.methods.pipedream.order import warm_up


class LayerProfile(NamedTuple):
    """One layer, for one minibatch.

    Attributes:
      seconds: of its forward and backward pass together.
      activation_bytes: of its output.
      weight_bytes: of its parameters.
    """

    seconds: float
    activation_bytes: float
    weight_bytes: float


class Stage(NamedTuple):
    """A run of layers, first to last, on some machines."""

    first: int
    last: int
    replicas: int


class Partition(NamedTuple):
    """The stages of a pipeline.

    Attributes:
      stages: first to last.
      seconds: per minibatch, in the steady state.
    """

    stages: tuple[Stage, ...]
    seconds: float

    @property
    def replicas(self) -> tuple[int, ...]:
        """Machines of each stage."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def in_flight(self) -> int:
        """Minibatches that each worker of the first stage has in flight (NOAM)."""
        return warm_up(self.replicas)[0]


def partition(
    layers: Sequence[LayerProfile], machines: int, bandwidth: float
) -> Partition:
    """The partition that takes the least time per minibatch; it uses all machines.

    Args:
      layers: profile, first to last.
      machines: number of them.
      bandwidth: bytes per second that a machine sends.

    Raises:
      MeshparError: no layers, no machines, or no bandwidth.
    """
    if not layers or machines < 1 or not bandwidth > 0:
        raise MeshparError(
            f"{len(layers)} layers, {machines} machines, bandwidth={bandwidth}: give "
            "at least one of each"
        )

    def alone(first: int, last: int, count: int) -> float:
        run = layers[first : last + 1]
        reduced = 2 * (count - 1) / count * sum(x.weight_bytes for x in run) / bandwidth
        return max(sum(x.seconds for x in run), reduced) / count

    @functools.cache
    def best(last: int, count: int) -> Partition:
        """Of layers 0..last on `count` machines."""
        stage = Stage(0, last, count)
        found = Partition((stage,), alone(0, last, count))
        for end in range(last):
            link = 2 * layers[end].activation_bytes / bandwidth
            for behind in range(1, count):
                before = best(end, count - behind)
                own = alone(end + 1, last, behind)
                seconds = max(before.seconds, link, own)
                if seconds < found.seconds:
                    stages = (*before.stages, Stage(end + 1, last, behind))
                    found = Partition(stages, seconds)
        return found

    return best(len(layers) - 1, machines)


def profile(
    layers: Sequence[Callable[[Any, Any], Any]],
    params: Sequence[Any],
    x: Any,
    repeats: int = 5,
) -> list[LayerProfile]:
    """Measures layers on the default device: the least of some repeats.

    Args:
      layers: functions (weights, input) -> output, first to last.
      params: weights of each layer.
      x: input of the first one, as large as a minibatch.
      repeats: of each measurement.
    """
    found = []
    for layer, weights in zip(layers, params, strict=True):

        def both(weights: Any, x: Any, layer: Callable[..., Any] = layer) -> Any:
            y, back = jax.vjp(layer, weights, x)
            return y, back(y)

        run, seconds = jax.jit(both), math.inf
        y, _ = jax.block_until_ready(run(weights, x))  # Compiles.
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(run(weights, x))
            seconds = min(seconds, time.perf_counter() - start)
        sizes = (sum(map(num_bytes, jax.tree.leaves(tree))) for tree in (y, weights))
        found.append(LayerProfile(seconds, *map(float, sizes)))
        x = y
    return found
