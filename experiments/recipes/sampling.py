"""The sample at the end of a run: one full forward pass for each of a few tokens.

It runs any model that `bind` gives, as it lies, and compiles one program. For more text
`experiments.generate` keeps a cache.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.arrays import Array, Params
from meshpar.lowering.train_program import TrainProgram


def sample(
    program: TrainProgram,
    params: Params,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    length: int,
    seed: int = 0,
    temperature: float = 0.8,
) -> list[int]:
    """Continues a prompt.

    Args:
      program: the program that trained the model.
      params: its parameters.
      prompt: at least one token id; the last `length` are used.
      num_tokens: number of tokens to generate.
      length: longest sequence of the model, in tokens.
      seed: seed of the draw.
      temperature: divisor of the logits.

    Returns:
      The generated token ids.
    """
    prompt = list(prompt)[-length:]
    window = np.zeros((1, length), np.int32)
    window[0, : len(prompt)] = prompt

    def generate(params: Params, window_BL: Array) -> Array:
        def body(i: Array, carry: tuple) -> tuple:
            window_BL, used, ids = carry
            logits_BLV = program.model.bind(params)(window_BL)
            logits_V = jax.lax.dynamic_index_in_dim(
                logits_BLV[0], used - 1, keepdims=False
            )
            key = jax.random.fold_in(jax.random.key(seed), i)
            token = jax.random.categorical(key, logits_V / temperature)
            full = used == length
            window_BL = jnp.where(full, jnp.roll(window_BL, -1, axis=1), window_BL)
            used = jnp.where(full, used, used + 1)
            window_BL = window_BL.at[0, used - 1].set(token)
            return window_BL, used, ids.at[i].set(token)

        start = (window_BL, jnp.int32(len(prompt)), jnp.zeros(num_tokens, jnp.int32))
        return jax.lax.fori_loop(0, num_tokens, body, start)[2]

    replicated = jax.sharding.NamedSharding(program.mesh, jax.sharding.PartitionSpec())
    ids = jax.jit(generate, out_shardings=replicated)(params, window)
    return np.asarray(ids).tolist()
