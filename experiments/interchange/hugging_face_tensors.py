"""Maps tensors of Hugging Face's transformers to parameters.

Parameters of this repository are stacked over layers, those of experts over experts as
well, and heads have a dim of their own. Files of transformers hold one matrix per layer
and expert: GPT-2 as [in, out] with q, k and v joined, the others as [out, in] like
torch.nn.Linear.
"""

import dataclasses
import itertools

from experiments.interchange.hugging_face_kinds import kind_of
from experiments.models.decoder_config import DecoderConfig


@dataclasses.dataclass(frozen=True)
class Tensor:
    """The making of one tensor of transformers from parameters.

    Attributes:
      paths: the parameters that it joins along the output dim.
      inputs: number of leading dims of a parameter, without layers and experts, that
        are inputs.
      transposed: whether it is [out, in].
    """

    paths: tuple[str, ...]
    inputs: int = 0
    transposed: bool = False


def _gpt2() -> dict[str, Tensor]:
    """{name: tensor}; {} in a name stands for the layer."""
    tensors = {
        "transformer.wte.weight": Tensor(("embedding",), 1),
        "transformer.wpe.weight": Tensor(("positions",), 1),
        "transformer.ln_f.weight": Tensor(("norm/scale",)),
        "transformer.ln_f.bias": Tensor(("norm/bias",)),
    }
    norms = {"ln_1": "attention_norm", "ln_2": "mlp_norm"}
    for module, path in norms.items():
        for suffix, param in (("weight", "scale"), ("bias", "bias")):
            name = f"transformer.h.{{}}.{module}.{suffix}"
            tensors[name] = Tensor((f"blocks/{path}/{param}",))
    modules = {
        "attn.c_attn": (("attention/q", "attention/k", "attention/v"), 1),
        "attn.c_proj": (("attention/o",), 2),
        "mlp.c_fc": (("mlp/up",), 1),
        "mlp.c_proj": (("mlp/down",), 1),
    }
    for module, (params, inputs) in modules.items():
        paths = [f"blocks/{param}" for param in params]
        name = f"transformer.h.{{}}.{module}"
        tensors[f"{name}.weight"] = Tensor(tuple(paths), inputs)
        tensors[f"{name}.bias"] = Tensor(tuple(f"{path}_bias" for path in paths))
    return tensors


_MLP = {
    "mixtral": {
        "block_sparse_moe.gate": "mlp/router",
        "block_sparse_moe.experts.{}.w1": "mlp/gate",
        "block_sparse_moe.experts.{}.w2": "mlp/down",
        "block_sparse_moe.experts.{}.w3": "mlp/up",
    },
    "qwen3_moe": {
        "mlp.gate": "mlp/router",
        **{f"mlp.experts.{{}}.{x}_proj": f"mlp/{x}" for x in ("gate", "up", "down")},
    },
}
"""{kind: {matrix of a feed-forward layer: parameter}}; {} stands for the expert."""

_DENSE = {f"mlp.{x}_proj": f"mlp/{x}" for x in ("gate", "up", "down")}
"""{matrix of a feed-forward layer without experts: parameter}."""

_NORMS = {
    "before": {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "mlp_norm",
    },
    "after": {
        "post_attention_layernorm": "attention_post_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    },
    "both": {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_post_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    },
}
"""{place of norms: {norm of a layer: parameter}}."""


def _llama(kind: str, config: DecoderConfig) -> dict[str, Tensor]:
    """{name: tensor} of Llama and its kin; {} in a name: the layer, then the expert."""
    tensors = {
        "model.embed_tokens.weight": Tensor(("embedding",), 1),
        "model.norm.weight": Tensor(("norm/scale",)),
    }
    if not config.tied:
        tensors["lm_head.weight"] = Tensor(("head",), 1, True)
    norms = dict(_NORMS[config.norm_place])
    if config.qk_norm:
        norms |= {f"self_attn.{x}_norm": f"attention/{x}_norm" for x in "qk"}
    for module, param in norms.items():
        name = f"model.layers.{{}}.{module}.weight"
        tensors[name] = Tensor((f"blocks/{param}/scale",))
    attention = {f"self_attn.{x}_proj": f"attention/{x}" for x in "qkvo"}
    mlp = _MLP.get(kind, _DENSE)
    for module, param in (attention | mlp).items():
        inputs = 2 if param == "attention/o" else 1
        name = f"model.layers.{{}}.{module}.weight"
        tensors[name] = Tensor((f"blocks/{param}",), inputs, True)
    biased = "qkvo" if config.bias else config.attention_bias.replace("none", "")
    modules = {f"self_attn.{x}_proj": f"attention/{x}" for x in biased}
    for module, param in (modules | (mlp if config.bias else {})).items():
        name = f"model.layers.{{}}.{module}.bias"
        tensors[name] = Tensor((f"blocks/{param}_bias",))
    return tensors


def _of_layer(tensor: Tensor, index: tuple[int, ...], period: int) -> tuple:
    """A tensor of layers in a pattern of some period, and its index in their stack."""
    if period == 1 or not index:
        return tensor, index
    row, number = divmod(index[0], period)
    prefix = f"blocks/layers/{number}/"
    paths = tuple(path.replace("blocks/", prefix, 1) for path in tensor.paths)
    return dataclasses.replace(tensor, paths=paths), (row, *index[1:])


def tensors_of(config: DecoderConfig) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """{name: (tensor, its index in the stack of its parameters)} of a decoder.

    The index is (row, expert), (row,) or (); a row is a layer, or a run of the pattern.

    Args:
      config: the decoder.

    Raises:
      ConfigError: transformers has no such decoder.
    """
    kind, tensors = kind_of(config), {}
    ranges, period = (config.depth, config.num_experts), len(config.windows)
    patterns = _gpt2() if kind == "gpt2" else _llama(kind, config)
    for name, tensor in patterns.items():
        for index in itertools.product(*map(range, ranges[: name.count("{}")])):
            tensors[name.format(*index)] = _of_layer(tensor, index, period)
    return tensors


def parts_of(name: str, config: DecoderConfig) -> dict[str, int]:
    """{name: outputs} of the matrices of a Llama that a matrix of Phi-3 joins.

    Args:
      name: of the tensor; one that joins nothing has no parts.
      config: the decoder.
    """
    heads, kv_heads = config.heads * config.head_dim, config.kv_heads * config.head_dim
    joined = {
        "qkv_proj": {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads},
        "gate_up_proj": {"gate_proj": config.mlp, "up_proj": config.mlp},
    }
    before, module, after = (*name.rsplit(".", 2), "", "")[:3]
    parts = joined.get(module, {})
    return {f"{before}.{part}.{after}": size for part, size in parts.items()}


def prefix_of(config: DecoderConfig) -> str:
    """The prefix of the names of all tensors but the head."""
    return "transformer." if kind_of(config) == "gpt2" else "model."
