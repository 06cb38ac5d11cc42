"""Configuration of the decoder: its shape, and its kind (GPT-2 or Llama)."""

import dataclasses
from collections.abc import Callable
from typing import Annotated

from experiments.data import MAX_VOCABULARY
from experiments.models.rope import Rope
from meshpar.ops import float8
from meshpar.ops.experts.config import ROUTINGS, SCORES, MixtureConfig
from meshpar.settings import SMALLEST, Choice, Number, Switch, check, real

_VOCAB = Number(0, MAX_VOCABULARY, "token ids", "0 takes those of the data")
_HEADS = Number(1, 2**14, "heads")
_HEAD_WIDTH = Number(0, 2**14, "features", "0 for embed / heads")
_SCORE_WIDTH = Number(0, 2**20, "features", "0 for that of one head")
_GROUP = Number(0, 2**24, "tokens", "0 for the whole sequence")
_ROPE_LENGTH = Number(0, 2**24, "tokens", "0 for all wavelengths")
_WINDOW_THETA = real(0, 1e12, note="0 for that of the other layers")
_NODES = Number(1, 2**10, "groups of experts")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and kind of a decoder.

    Attributes:
      vocab: number of token ids; 0 takes the vocabulary of the data.
      length: longest sequence, in tokens.
      depth: number of layers.
      embed: width of the residual stream.
      heads: number of query heads; divides `embed` unless `head_width` is given.
      kv_heads: number of key and value heads (grouped-query attention).
      head_width: width of one head; 0 for embed / heads.
      qk_norm: whether queries and keys of every head are normalized.
      qk_norm_joint: whether the norm of `qk_norm` is one over all heads, in place of
        one for each head.
      score_width: scores of attention are divided by the square root of this width; 0
        for the width of one head.
      mlp: width of the feed-forward layer.
      position: how positions enter: "rope" turns queries and keys, "learned" adds a
        vector for each position.
      norm: kind of the norms: "rmsnorm" or "layernorm".
      norm_place: where attention and mlp have norms: "before" them, "after" them (on
        what they add to the residual stream), or "both".
      norm_plus_one: whether norms multiply by one plus their scale, in place of their
        scale.
      activation: feed-forward layer: "swiglu" and "geglu" have a gate, "gelu" has none.
      bias: whether all linear layers have biases.
      attention_bias: which matrices of attention have biases where `bias` is false:
        "none", "qkv" (queries, keys, values) or "qkvo" (also the output).
      tied: whether the head is the transposed embedding.
      dropout: rate of dropout after the embedding, attention and mlp; 0 for none.
      embedding_scale: the embedding of tokens is multiplied by this.
      rope_theta: base of the rotary wavelengths.
      rope_factor: rotary wavelengths are stretched by this factor, for sequences longer
        than those of pretraining; 1 for no change.
      rope_length: length of the sequences of pretraining: wavelengths that turn often
        in it are not stretched. 0 stretches all of them.
      rope_low: wavelengths with fewer turns than this in `rope_length` are stretched by
        the whole factor.
      rope_high: wavelengths with more turns than this in `rope_length` are not
        stretched.
      window_rope_theta: base of the rotary wavelengths of layers with a window, which
        are never stretched; 0 for the wavelengths of the other layers.
      norm_eps: added to the mean square in norms, before its root.
      init_std: standard deviation of initial weights; 0 for 1/sqrt(fan_in).
      num_experts: experts of each layer, of width `mlp` each; 0 for a dense model.
      experts_per_token: experts that each token goes to.
      shared_experts: further experts, to which every token goes.
      routing: "capacity" gives every expert a number of slots and drops tokens beyond
        them; "dropless" drops none.
      capacity_factor: slots of an expert, as a multiple of an even share of the tokens.
      routing_group: tokens of a sequence that share an expert's slots; 0 for all.
      exchange_bound: with dropless routing, the most that one device sends to another,
        as a multiple of an even share; the rest is dropped and counted. 0 for no bound.
      router_score: how the router scores experts: "softmax" over all of them, or
        "sigmoid" of each.
      normalize_weights: whether the weights of a token's experts sum to one.
      weight_scale: the weights of a token's experts are multiplied by this.
      router_nodes: groups of experts; a token uses experts of `nodes_per_token` groups.
        1 for no groups.
      nodes_per_token: groups of experts that one token may use.
      router_bias: whether experts are balanced by a bias on the router's scores, which
        rises for those with few tokens and falls for the others.
      router_jitter: inputs of the router are multiplied by random numbers between 1 -
        jitter and 1 + jitter.
      balance_loss: weight of GShard's auxiliary loss, which is least where all experts
        get as many tokens.
      z_loss: weight of the loss on the router's logits, which keeps them small.
      window: tokens that each token sees in attention, itself among them; 0 for all.
      global_every: every so many layers, one sees whole sequences in place of the
        window; 0 for no such layer. If it does not divide the depth, all layers are one
        pattern, which no pipeline can split.
      loss_block: tokens of each sequence whose logits are in memory at once; 0 for all.
      float8: whether layers multiply by weights in float8, as in `meshpar.ops.float8`.
    """

    vocab: Annotated[int, _VOCAB] = 256
    length: Annotated[int, Number(1, 2**24, "tokens")] = 128
    depth: Annotated[int, Number(1, 10_000, "layers")] = 4
    embed: Annotated[int, Number(1, 2**20, "features")] = 128
    heads: Annotated[int, _HEADS] = 4
    kv_heads: Annotated[int, _HEADS] = 2
    head_width: Annotated[int, _HEAD_WIDTH] = 0
    qk_norm: Annotated[bool, Switch()] = False
    qk_norm_joint: Annotated[bool, Switch()] = False
    score_width: Annotated[int, _SCORE_WIDTH] = 0
    mlp: Annotated[int, Number(1, 2**22, "features")] = 384
    position: Annotated[str, Choice(("rope", "learned"))] = "rope"
    norm: Annotated[str, Choice(("rmsnorm", "layernorm"))] = "rmsnorm"
    norm_place: Annotated[str, Choice(("before", "after", "both"))] = "before"
    norm_plus_one: Annotated[bool, Switch()] = False
    activation: Annotated[str, Choice(("swiglu", "geglu", "gelu"))] = "swiglu"
    bias: Annotated[bool, Switch()] = False
    attention_bias: Annotated[str, Choice(("none", "qkv", "qkvo"))] = "none"
    tied: Annotated[bool, Switch()] = False
    dropout: Annotated[float, real(0, 1, below=True)] = 0.0
    embedding_scale: Annotated[float, real(0, 1e6, above=True)] = 1.0
    rope_theta: Annotated[float, real(1, 1e12)] = 10_000.0
    rope_factor: Annotated[float, real(1, 1e6)] = 1.0
    rope_length: Annotated[int, _ROPE_LENGTH] = 0
    rope_low: Annotated[float, real(0, 1e6, above=True)] = 1.0
    rope_high: Annotated[float, real(0, 1e6, above=True)] = 4.0
    window_rope_theta: Annotated[float, _WINDOW_THETA] = 0.0
    norm_eps: Annotated[float, real(SMALLEST, 1)] = 1e-5
    init_std: Annotated[float, real(0, 100, note="0 for 1/sqrt(fan_in)")] = 0.0
    window: Annotated[int, Number(0, 2**24, "tokens", "0 for whole sequences")] = 0
    global_every: Annotated[int, Number(0, 10_000, "layers", "0 for none")] = 0
    loss_block: Annotated[int, Number(0, 2**24, "tokens", "0 for all at once")] = 0
    float8: Annotated[bool, Switch()] = False
    num_experts: Annotated[int, Number(0, 2**14, "experts", "0 for a dense model")] = 0
    experts_per_token: Annotated[int, Number(1, 2**10, "experts")] = 2
    shared_experts: Annotated[int, Number(0, 2**10, "experts")] = 0
    routing: Annotated[str, Choice(ROUTINGS)] = "capacity"
    capacity_factor: Annotated[float, real(0, 1e6, above=True)] = 1.25
    routing_group: Annotated[int, _GROUP] = 0
    exchange_bound: Annotated[float, real(0, 1e6, note="0 for no bound")] = 0.0
    router_score: Annotated[str, Choice(SCORES)] = "softmax"
    normalize_weights: Annotated[bool, Switch()] = True
    weight_scale: Annotated[float, real(0, 1e6, above=True)] = 1.0
    router_nodes: Annotated[int, _NODES] = 1
    nodes_per_token: Annotated[int, _NODES] = 1
    router_bias: Annotated[bool, Switch()] = False
    router_jitter: Annotated[float, real(0, 1, below=True)] = 0.0
    balance_loss: Annotated[float, real(0, 1e6)] = 0.01
    z_loss: Annotated[float, real(0, 1e6)] = 0.001

    def __post_init__(self):
        check(self)
        if self.heads % self.kv_heads or (
            self.embed % self.heads and not self.head_width
        ):
            raise ValueError(
                f"embed={self.embed}, heads={self.heads}, kv_heads={self.kv_heads}: "
                "kv_heads must divide heads, and heads must divide embed; use other "
                "numbers"
            )
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: rope needs an even head_dim")
        if self.loss_block and self.length % self.loss_block:
            raise ValueError(
                f"loss_block={self.loss_block}: use a divisor of length={self.length}, "
                "or 0 for all at once"
            )
        if self.global_every and not self.window:
            raise ValueError(
                f"global_every={self.global_every}, window=0: use a window beside it"
            )
        if self.qk_norm_joint and not (self.qk_norm and self.norm == "rmsnorm"):
            raise ValueError(
                f"qk_norm_joint=True, qk_norm={self.qk_norm}, norm={self.norm}: use "
                "qk_norm=True and norm=rmsnorm beside it"
            )
        if self.rope_low >= self.rope_high:
            raise ValueError(
                f"rope_low={self.rope_low}, rope_high={self.rope_high}: use a lower "
                "rope_low or a higher rope_high"
            )
        if self.num_experts:
            self._check_experts()

    def _check_experts(self) -> None:
        _ = self.mixture  # Checks its own fields.
        if self.bias:
            raise ValueError("bias=True: experts have no biases; use bias=False")
        if self.float8:
            raise ValueError(
                "float8=True: experts do not multiply in float8; use float8=False"
            )

    @property
    def unread(self) -> dict[str, str]:
        found = {}
        if not self.window:
            found["window_rope_theta"] = "model.window=0"
        if not self.rope_length:
            found |= dict.fromkeys(("rope_low", "rope_high"), "model.rope_length=0")
        if self.rope_factor == 1:
            found["rope_length"] = "model.rope_factor=1"
        if self.position != "rope":
            names = *_OF_ROPE, "window_rope_theta"
            found |= dict.fromkeys(names, f"model.position={self.position}")
        if self.bias:
            found["attention_bias"] = "model.bias=True"
        of_other = ("exchange_bound",)
        if self.routing == "dropless":
            of_other = ("capacity_factor", "routing_group")
        found |= dict.fromkeys(of_other, f"model.routing={self.routing}")
        if not self.num_experts:
            found |= dict.fromkeys(_OF_EXPERTS, "model.num_experts=0")
        return found

    @property
    def matmul(self) -> Callable | None:
        """The function that multiplies by the weights of layers; None for jax's own."""
        return float8.matmul if self.float8 else None

    @property
    def mixture(self) -> MixtureConfig:
        """The settings of the mixtures of experts."""
        return MixtureConfig(
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            routing=self.routing,
            capacity_factor=self.capacity_factor,
            group=self.routing_group,
            bound=self.exchange_bound,
            score=self.router_score,
            normalize=self.normalize_weights,
            scale=self.weight_scale,
            num_nodes=self.router_nodes,
            nodes_per_token=self.nodes_per_token,
            jitter=self.router_jitter,
        )

    @property
    def depends_on_microbatches(self) -> bool:
        """Whether a batch's loss or gradient changes with its number of microbatches.

        Experts are balanced within each of them; float8 scales the gradients of weights
        for each.
        """
        return self.num_experts > 0 or self.float8

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.head_width or self.embed // self.heads

    @property
    def gated(self) -> bool:
        """Whether feed-forward layers multiply by a gate."""
        return self.activation != "gelu"

    @property
    def windows(self) -> tuple[int, ...]:
        """The windows of the layers of one pattern, which repeats through the depth."""
        every = self.global_every
        if not every:
            return (self.window,)
        length = self.depth if self.depth % every else every
        return tuple(self.window if n % every else 0 for n in range(1, length + 1))

    def rope(self, window: int) -> Rope:
        """The rotary positions of layers with some window."""
        if window and self.window_rope_theta:
            return Rope(self.window_rope_theta)
        stretch = self.rope_factor, self.rope_length, self.rope_low, self.rope_high
        return Rope(self.rope_theta, *stretch)

    def flops_per_token(self) -> float:
        """Training FLOPs per token, forward and backward.

        6 per weight of a matmul, plus 12 * heads * head_dim * length for attention in
        each layer, or the window in place of the length.
        Source: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B.
        """
        attention = self.embed * self.head_dim * 2 * (self.heads + self.kv_heads)
        mlp = self.embed * self.mlp * (3 if self.gated else 2)
        if self.num_experts:
            mlp *= self.experts_per_token + self.shared_experts
            mlp += self.embed * self.num_experts
        weights = self.depth * (attention + mlp) + self.embed * self.vocab
        seen = sum(min(size or self.length, self.length) for size in self.windows)
        seen *= self.depth // len(self.windows)
        return 6 * weights + 12 * self.heads * self.head_dim * seen


_OF_EXPERTS = (
    *("experts_per_token", "shared_experts", "routing", "capacity_factor"),
    *("routing_group", "exchange_bound", "router_score", "normalize_weights"),
    *("weight_scale", "router_nodes", "nodes_per_token", "router_bias"),
    *("router_jitter", "balance_loss", "z_loss"),
)
_OF_ROPE = ("rope_theta", "rope_factor", "rope_length", "rope_low", "rope_high")

_PLAIN = dict(
    score_width=0,
    norm_place="before",
    norm_plus_one=False,
    attention_bias="none",
    embedding_scale=1.0,
)
GPT2_KIND = dict(
    position="learned",
    norm="layernorm",
    activation="gelu",
    bias=True,
    tied=True,
    qk_norm=False,
    **_PLAIN,
)
"""Fields of `DecoderConfig` that make a GPT-2; the defaults make a Llama."""
