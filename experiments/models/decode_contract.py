"""The collectives of one decoded token, for every sequence of a batch.

Rules of the layout say which axes split a dim. A matmul over a dim that axes split ends
in one all_reduce over them.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from experiments.models.decoder_config import DecoderConfig
from meshpar.contracts.declared import DeclaredCollective
from meshpar.layouts.axes import EXPERT, in_use, ways_of
from meshpar.layouts.layout import Layout

_FLOAT = 4
"""Bytes of a float32 or an int32."""


@dataclasses.dataclass(frozen=True)
class _Token:
    """One token of every sequence under a layout.

    Attributes:
      config: the decoder.
      layout: of decoding.
      batch_size: sequences.
      item: bytes of a number of an activation.
    """

    config: DecoderConfig
    layout: Layout
    batch_size: int
    item: int

    def axes(self, dim: str) -> tuple[str, ...]:
        """The axes that split a dim of activations."""
        return in_use(self.layout.activation_rules[dim], self.layout.sizes)

    def part(self, size: int, dim: str) -> int:
        """The size of a dim on one device."""
        return size // ways_of(self.axes(dim), self.layout.sizes)

    @property
    def rows(self) -> int:
        """Rows of one device's activations."""
        return self.part(self.batch_size, "batch")

    @property
    def embed(self) -> int:
        """Width of one device's residual stream."""
        return self.part(self.config.embed, "embed")

    def term(
        self, kind: str, axes: tuple[str, ...], num_bytes: int, times: int, why: str
    ) -> Iterator[DeclaredCollective]:
        """One term, or none without axes.

        Args:
          kind: of collective.
          axes: over which it runs.
          num_bytes: bytes of the whole tensor, each time.
          times: how often it runs.
          why: purpose.
        """
        if not axes or not times:
            return
        yield DeclaredCollective(
            kind,
            axes,
            ways_of(axes, self.layout.sizes),
            times,
            num_bytes * times,
            why,
            gathers=kind == "all_gather",
        )

    def over_embed(self) -> Iterator[DeclaredCollective]:
        """Sums over a split embed dim: norms, and matmuls that begin with it."""
        config, axes, rows = self.config, self.axes("embed"), self.rows
        norms = (4 if config.norm_place == "both" else 2) * config.depth + 1
        sums = 2 if config.norm == "layernorm" else 1
        why = "sums of norms over the embed dim"
        yield from self.term("all_reduce", axes, rows * _FLOAT, norms * sums, why)
        heads = self.part(config.heads, "heads")
        heads += 2 * self.part(config.kv_heads, "kv_heads")
        size = rows * heads * config.head_dim * self.item
        yield from self.term(
            "all_reduce", axes, size, config.depth, "queries, keys and values"
        )
        size = rows * self.part(config.vocab, "vocab") * self.item
        yield from self.term("all_reduce", axes, size, 1, "logits")

    def joint_norms(self) -> Iterator[DeclaredCollective]:
        """Sums of norms over all heads."""
        times = self.config.depth if self.config.qk_norm_joint else 0
        for dim in ("heads", "kv_heads"):
            why = "sums of norms over the heads"
            size = self.rows * _FLOAT
            yield from self.term("all_reduce", self.axes(dim), size, times, why)

    def attention(self) -> Iterator[DeclaredCollective]:
        """Moves between new tokens and the cache (`ops.cached_attention`)."""
        config, depth = self.config, self.config.depth
        rows = self.part(self.batch_size, "cache_batch")
        length, heads_axes = self.axes("cache_length"), self.axes("heads")
        split = heads_axes == self.axes("kv_heads")
        heads = self.part(config.heads, "heads") if split else config.heads
        if not split:
            size = self.rows * config.heads * config.head_dim * self.item
            why = "queries of all heads"
            yield from self.term("all_gather", heads_axes, size, depth, why)
        why = "parts of the cache merged"
        size = rows * heads * _FLOAT
        yield from self.term("all_reduce", length, size, depth, why)
        size *= config.head_dim + 1
        yield from self.term("all_reduce", length, size, depth, why)
        more = self.axes("cache_batch")[len(self.axes("batch")) :]
        size = self.rows * self.part(config.heads, "heads") * config.head_dim
        yield from self.term(
            "all_gather", more, size * self.item, depth, "outputs of attention"
        )
        yield from self.output(heads_axes, "outputs of attention")

    def output(
        self, axes: tuple[str, ...], why: str, times: int | None = None
    ) -> Iterator[DeclaredCollective]:
        """The all_reduce of one output in every layer."""
        size = self.rows * self.embed * self.item
        times = self.config.depth if times is None else times
        yield from self.term("all_reduce", axes, size, times, why)

    def mlp(self, width: int) -> Iterator[DeclaredCollective]:
        """The feed-forward layers of some width that all tokens go through."""
        config = self.config
        size = self.rows * self.part(width, "mlp") * self.item
        size *= 2 if config.gated else 1
        axes, depth = self.axes("embed"), config.depth
        yield from self.term("all_reduce", axes, size, depth, "hidden of the mlp")
        yield from self.output(self.axes("mlp"), "outputs of the mlp")

    def experts(self) -> Iterator[DeclaredCollective]:
        """Dropless mixtures of experts, whose weights are whole along the embed dim."""
        config, depth = self.config, self.config.depth
        by_expert, embed = in_use((EXPERT,), self.layout.sizes), self.axes("embed")
        ways = ways_of(by_expert, self.layout.sizes)
        tokens, rows = self.rows * ways, self.rows * config.embed * self.item
        matrix = config.num_experts // ways * config.embed * self.item
        matrix *= self.part(config.mlp, "mlp")
        matrices = 3 if config.gated else 2
        choices = tokens * config.experts_per_token * _FLOAT
        gathers = [
            (embed, matrix, matrices, "weights of experts"),
            (embed, rows, 1, "tokens, whole along the embed dim"),
            (by_expert, rows * ways, 1, "tokens to all experts"),
            (by_expert, choices, 2, "experts of tokens, and their weights"),
        ]
        for axes, size, times, why in gathers:
            yield from self.term("all_gather", axes, size, depth * times, why)
        size = self.rows * config.num_experts * _FLOAT
        yield from self.term("all_reduce", embed, size, depth, "scores of the router")
        why = "outputs of experts"
        yield from self.term("all_reduce", self.axes("mlp"), rows, depth, why)
        yield from self.term("reduce_scatter", by_expert, rows * ways, depth, why)
        # Some platforms have no top_k of a split batch.
        why, scores = "scores of the router", self.batch_size * config.num_experts
        batch = self.axes("batch")
        for term in self.term("all_gather", batch, scores * _FLOAT, depth, why):
            yield dataclasses.replace(term, bound=True)


def declared(
    config: DecoderConfig, layout: Layout, batch_size: int, dtype: Any
) -> list[DeclaredCollective]:
    """The collectives of one decoded token of every sequence.

    Args:
      config: the decoder.
      layout: of decoding (`generation.layouts`).
      batch_size: sequences.
      dtype: of activations and cache.
    """
    token = _Token(config, layout, batch_size, jnp.dtype(dtype).itemsize)
    vocab = token.axes("vocab")
    size = token.rows * config.vocab * token.item
    terms = [
        *token.output(vocab, "lookup in the split vocabulary", times=1),
        *token.term("all_gather", vocab, size, 1, "logits of all tokens"),
        *token.over_embed(),
        *token.joint_norms(),
        *token.attention(),
    ]
    dense = config.mlp * (config.shared_experts if config.num_experts else 1)
    if dense:
        terms += token.mlp(dense)
    if config.num_experts:
        terms += token.experts()
    return terms
