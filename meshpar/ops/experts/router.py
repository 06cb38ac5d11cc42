"""Router of a mixture of experts: the experts of each token, and their weights."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.ops.experts.config import MixtureConfig


class Routing(NamedTuple):
    """The experts of every token.

    Attributes:
      experts: int32, best first; the lower number first if scores are equal.
      weights: float32 weights of their outputs.
      shares: float32 scores of all experts, divided by their sum.
      logits: float32.
    """

    experts: Array
    weights: Array
    shares: Array
    logits: Array


def route(
    x_BLD: Array,
    router_DE: Array,
    config: MixtureConfig,
    *,
    bias_E: Array | None = None,
    key: Array | None = None,
) -> Routing:
    """Chooses the experts of every token, in float32.

    Args:
      x_BLD: tokens, any float dtype.
      router_DE: the router's weights.
      config: of the mixture.
      bias_E: added to the scores by which experts are chosen, but not to the weights of
        their outputs; no gradient passes through it (`balance.balanced`).
      key: random key of the jitter, which is the same for a token on every layout;
        None for none.

    Source: Shazeer et al., arXiv:1701.06538, section 2.1 (top-k); DeepSeek-V3,
      arXiv:2412.19437, section 2.1.2 (bias, nodes).
    """
    x_BLD = x_BLD.astype(jnp.float32)
    if config.jitter and key is not None:
        low, high = 1 - config.jitter, 1 + config.jitter
        x_BLD *= jax.random.uniform(key, x_BLD.shape, jnp.float32, low, high)
    router_DE = router_DE.astype(jnp.float32)
    logits_BLE = jnp.einsum(
        "BLD,DE->BLE", x_BLD, router_DE, precision=lax.Precision.HIGHEST
    )
    if config.score == "softmax":
        scores_BLE = shares_BLE = jax.nn.softmax(logits_BLE)
    else:
        scores_BLE = jax.nn.sigmoid(logits_BLE)
        shares_BLE = scores_BLE / jnp.sum(scores_BLE, axis=-1, keepdims=True)
    chosen_by_BLE = lax.stop_gradient(scores_BLE)
    if bias_E is not None:
        chosen_by_BLE += lax.stop_gradient(bias_E.astype(jnp.float32))[None, None]
    chosen_by_BLE = _on_best_nodes(chosen_by_BLE, config)
    experts_BLX = lax.top_k(chosen_by_BLE, config.experts_per_token)[1]
    weights_BLX = jnp.take_along_axis(scores_BLE, experts_BLX, axis=-1)
    if config.normalize:
        total = jnp.sum(weights_BLX, axis=-1, keepdims=True)
        weights_BLX /= jnp.maximum(total, 1e-20)
    return Routing(experts_BLX, config.scale * weights_BLX, shares_BLE, logits_BLE)


def _on_best_nodes(scores_BLE: Array, config: MixtureConfig) -> Array:
    """The scores, -inf outside each token's best nodes: those with the best pairs."""
    if config.num_nodes == config.nodes_per_token:
        return scores_BLE
    shape, nodes = scores_BLE.shape, config.num_nodes
    grouped = scores_BLE.reshape(*shape[:-1], nodes, shape[-1] // nodes)
    pair = lax.top_k(grouped, min(2, grouped.shape[-1]))[0]
    best = lax.top_k(jnp.sum(pair, axis=-1), config.nodes_per_token)[1]
    is_best = jnp.any(best[..., None] == jnp.arange(nodes)[None, None, None], axis=-2)
    return jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(shape)
