"""Next-token cross-entropy: vocabulary-parallel, and chunked to save memory."""

import jax
import jax.numpy as jnp

from meshpar import layouts, vocabulary


def logits(x_BLD: jax.Array, w_DV: jax.Array) -> jax.Array:
    """The head: logits_BLV, split over the devices that hold the vocab."""
    logits_BLV = jnp.einsum("BLD,DV->BLV", x_BLD, w_DV)
    return layouts.constrain(logits_BLV, "batch", "length", "vocab")


def cross_entropy(logits_BLV: jax.Array, targets_BL: jax.Array) -> jax.Array:
    """Mean negative log-likelihood of the targets, in nats per token, float32."""
    return jnp.mean(vocabulary.token_losses(logits_BLV, targets_BL))


def blockwise_cross_entropy(
    x_BLD: jax.Array, w_DV: jax.Array, targets_BL: jax.Array, chunk: int
) -> jax.Array:
    """Head and `cross_entropy` over `chunk` tokens of every sequence at a time.

    The logits of one chunk are all that exists, in the backward pass too, which
    computes them again: [B, chunk, V] in place of [B, L, V].

    Args:
      x_BLD: what the head sees.
      w_DV: the head; its gradient is summed over the chunks in float32.
      targets_BL: token ids.
      chunk: divides L.
    """
    num = x_BLD.shape[1] // chunk

    def split(x_BL: jax.Array) -> jax.Array:
        return x_BL.reshape(x_BL.shape[0], num, chunk, *x_BL.shape[2:]).swapaxes(0, 1)

    # Whole along D before the loop: inside, each chunk would gather it again.
    w_DV = layouts.constrain(w_DV, None, "vocab").astype(jnp.float32)

    @jax.checkpoint
    def one(_: None, part: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        x_BCD, targets_BC = part
        logits_BCV = logits(x_BCD, w_DV.astype(x_BCD.dtype))
        return None, cross_entropy(logits_BCV, targets_BC)

    return jnp.mean(jax.lax.scan(one, None, (split(x_BLD), split(targets_BL)))[1])
