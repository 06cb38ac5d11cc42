"""The decoder with a cache of keys and values, for generation."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx

import meshpar
from experiments.models.decode_contract import declared
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig
from meshpar.arrays import Array, Params
from meshpar.models.cached import CachedModel
from meshpar.ops.cached_attention import CACHE_DIMS, KeysAndValues


def cached_decoder(config: DecoderConfig, model: meshpar.Model) -> CachedModel:
    """The decoder as a function of its cache {"keys", "values"}.

    Mixtures of experts are dropless: a capacity counts the tokens of whole sequences,
    and one token has none beside it that it could be dropped for.

    Args:
      config: the decoder.
      model: the decoder as it trains.
    """

    def init(batch_size: int, length: int, dtype: Any) -> Params:
        sizes = config.depth, batch_size, length, config.kv_heads, config.head_dim
        return KeysAndValues(*[jnp.zeros(sizes, dtype)] * 2)._asdict()

    def run(
        params: Params, cache: Params, tokens_BL: Array, positions_BL: Array
    ) -> tuple[Array, Params]:
        generating = _dropless(config) if config.num_experts else model
        decoder = generating.bind(params)
        logits_BLV, new = decoder.with_cache(
            tokens_BL, positions_BL, KeysAndValues(**cache)
        )
        return logits_BLV, new._asdict()

    return CachedModel(
        init,
        lambda path, num_dims: CACHE_DIMS,
        run,
        max_length=config.length if config.position == "learned" else 0,
        declare=functools.partial(declared, config),
        streams=True,
    )


@functools.cache
def _dropless(config: DecoderConfig) -> meshpar.Model:
    """The decoder for generation, made once; outside, so that models can be pickled."""
    config = dataclasses.replace(config, routing="dropless", exchange_bound=0.0)
    return meshpar.from_nnx(lambda rngs: Decoder(config, rngs), _no_loss)


def _no_loss(decoder: nnx.Module, batch: Any) -> Array:
    raise AssertionError("a decoder that generates has no loss")
