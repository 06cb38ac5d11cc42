"""The decoder as a `meshpar.Model`: its loss, its stack of layers and its cache."""

import dataclasses
from typing import Any

import meshpar
from experiments.models.attention import Packed
from experiments.models.cached_decoder import cached_decoder
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig
from experiments.models.loss import with_experts, with_weight
from meshpar.arrays import Array
from meshpar.ops.experts import Statistics


def language_model(config: DecoderConfig) -> meshpar.Model:
    """The decoder with next-token cross-entropy, as a model with layers and a cache.

    Its batches are {"tokens": ids_BL, "targets": ids_BL}, both int32, and perhaps
    "weights", float32 [B, L]: the weight of every token in the mean loss. Packed
    documents have "segments" and "positions" (`Packed`).
    """

    def head_loss(decoder: Decoder, x: Any, batch: dict[str, Array]) -> Any:
        x_BLD, *statistics = x if config.num_experts else (x,)
        weights = [batch["weights"]] if "weights" in batch else []
        loss = decoder.head_loss(x_BLD, batch["targets"], *weights)
        if not statistics:
            return with_weight(loss, batch)
        training = not decoder.dropout.deterministic
        loss, metrics = with_experts(
            loss, Statistics.unpacked(*statistics), config, training
        )
        return with_weight(loss, batch, metrics)

    stack = meshpar.LayerStack(
        stack="blocks",
        embed=lambda decoder, batch: decoder.embed(batch["tokens"], Packed.of(batch)),
        layer=lambda block, x, packed: block(x, packed),
        head_loss=head_loss,
        context=lambda decoder, batch: Packed.of(batch),
        pattern=len(config.windows),
    )
    model = meshpar.from_nnx(lambda rngs: Decoder(config, rngs), stack)
    return dataclasses.replace(model, cached=cached_decoder(config, model))
