"""A Llama and its training step in compiled PyTorch, a yardstick on one GPU.

torch.compile of the layer, once for all, and of the loss, as torchtitan does: compiling
the whole step took more than 110 s. Attention by cuDNN or flash attention, autocast to
bfloat16, layers that keep what a policy says, the loss in blocks of tokens, fused Adam.
It begins with meshpar's weights.
"""

import contextlib
import functools
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.gpu_cases import (
    Case,
    emit,
    emit_speed,
    random_batch,
    times_of_a_step,
)
from experiments.benchmarks.gpu_programs import make_program
from experiments.models.decoder_config import DecoderConfig
from meshpar.layouts import mixes

PROGRAM = "torch.compile"


def run(case: Case, rehearsal: bool) -> None:
    """Prints the row of a case, or one that says why there is none."""
    try:
        import torch
    except ImportError:
        emit(program=PROGRAM, case="", status="torch is not installed")
        return
    if not torch.cuda.is_available() and not rehearsal:
        emit(program=PROGRAM, case="", status="torch sees no GPU")
        return
    # Jax makes the first weights, and gives the memory back.
    os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
    _measure(torch, case, rehearsal)


def _measure(torch: Any, case: Case, rehearsal: bool) -> None:
    config = case.config(rehearsal)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        model = _model(torch, config.model, case)
    model.to_empty(device=device)
    for layer in model.layers:
        layer.compile(fullgraph=True)
    model.block_loss = torch.compile(model.block_loss, fullgraph=True)
    program = make_program(case._replace(unroll=1), rehearsal, jax.devices()[0])
    _load(torch, model, config.model, program.init(0).params)
    fused = device == "cuda"
    optimizer = torch.optim.Adam(model.parameters(), 3e-4, (0.9, 0.95), fused=fused)
    batch = {
        name: torch.from_numpy(np.asarray(x, np.int64)).to(device)
        for name, x in random_batch(config).items()
    }

    def loss_fn() -> Any:
        with torch.autocast(device, torch.bfloat16):
            return model(batch["tokens"], batch["targets"])

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        with _cudnn_first(torch, device):
            loss = loss_fn()
            loss.backward()
        optimizer.step()
        return loss.detach()

    first = step().item()
    times = times_of_a_step(step, lambda loss: loss.item())
    kind, peak = "cpu", None
    if device == "cuda":
        kind = torch.cuda.get_device_name()
        peak = torch.cuda.max_memory_allocated() / 1e9
    more = {"first_loss": first, "peak_gb": peak, "torch": torch.__version__}
    emit_speed(PROGRAM, case, config, times, kind, **more)


def _cudnn_first(torch: Any, device: str) -> Any:
    """Attention by cuDNN where it can, by flash attention elsewhere."""
    if device == "cpu":
        return contextlib.nullcontext()
    attention = torch.nn.attention
    kinds = attention.SDPBackend
    backends = [kinds.CUDNN_ATTENTION, kinds.FLASH_ATTENTION]
    return attention.sdpa_kernel(backends, set_priority=True)


def _load(
    torch: Any, model: Any, config: DecoderConfig, params: Mapping[str, Any]
) -> None:
    """Gives the modules the weights of meshpar; torch's matmuls turn theirs."""

    def put(weight: Any, x: jax.Array, columns: int = 0) -> None:
        x = x.reshape(-1, columns).T if columns else x
        source = torch.from_numpy(np.array(x))
        with torch.no_grad():
            weight.copy_(source)

    put(model.embedding.weight, params["embedding"])
    put(model.norm.weight, params["norm/scale"])
    if config.tied:
        model.head.weight = model.embedding.weight
    else:
        put(model.head.weight, params["head"], config.vocab)
    heads = config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    out = dict(q=heads, k=keys, v=keys, o=config.embed)
    wide = dict(gate=config.mlp, up=config.mlp, down=config.embed)
    for name, columns in (out | wide).items():
        folder = "attention" if name in out else "mlp"
        stack = np.asarray(params[f"blocks/{folder}/{name}"])
        for layer, x in zip(model.layers, stack, strict=True):
            put(getattr(layer, name).weight, x, columns)
    for i, name in enumerate(("attention_norm", "mlp_norm")):
        for layer, x in zip(
            model.layers, np.asarray(params[f"blocks/{name}/scale"]), strict=True
        ):
            put(layer.norms[i].weight, x)


def _policies(
    torch: Any, config: DecoderConfig, case: Case
) -> tuple[list[str], dict[str, Any]]:
    """The checkpoint policy of every layer, and its context if it keeps results."""
    policies = [
        policy
        for policy, count in mixes.segments(case.remat, config.depth)
        for _ in range(count)
    ]
    kernels = torch.ops.aten
    attention = [
        kernels._scaled_dot_product_cudnn_attention.default,
        kernels._scaled_dot_product_flash_attention.default,
    ]
    kept = {"attention": attention, "dots": [*attention, kernels.mm.default]}
    make = torch.utils.checkpoint.create_selective_checkpoint_contexts
    return policies, {
        name: functools.partial(make, operations) for name, operations in kept.items()
    }


def _rotate(torch: Any, theta: float, x_BNLH: Any) -> Any:
    """Rotary positions."""
    half = x_BNLH.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x_BNLH.device) / half)
    angle = torch.arange(x_BNLH.shape[2], device=x_BNLH.device)[:, None] * frequency
    sin, cos = angle.sin(), angle.cos()
    a, b = x_BNLH.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_BNLH.dtype)


def _model(torch: Any, config: DecoderConfig, case: Case) -> Any:
    """A Llama as a torch module: (tokens, targets) -> mean loss."""
    nn, functional = torch.nn, torch.nn.functional
    head_dim = config.head_dim
    checkpoint = torch.utils.checkpoint.checkpoint
    policies, contexts = _policies(torch, config, case)

    rotate = functools.partial(_rotate, torch, config.rope_theta)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            embed, keys = config.embed, config.kv_heads * head_dim
            heads = config.heads * head_dim
            linear = functools.partial(nn.Linear, bias=False)
            norms = (nn.RMSNorm(embed, config.norm_eps) for _ in range(2))
            self.norms = nn.ModuleList(norms)
            self.q, self.o = linear(embed, heads), linear(heads, embed)
            self.k, self.v = linear(embed, keys), linear(embed, keys)
            self.gate, self.up = linear(embed, config.mlp), linear(embed, config.mlp)
            self.down = linear(config.mlp, embed)

        def forward(self, x_BLD):
            h = self.norms[0](x_BLD)
            q, k, v = (
                f(h).unflatten(-1, (-1, head_dim)).transpose(1, 2)
                for f in (self.q, self.k, self.v)
            )
            y = functional.scaled_dot_product_attention(
                rotate(q), rotate(k), v, is_causal=True, enable_gqa=True
            )
            x_BLD = x_BLD + self.o(y.transpose(1, 2).flatten(2))
            h = self.norms[1](x_BLD)
            return x_BLD + self.down(functional.silu(self.gate(h)) * self.up(h))

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(config.vocab, config.embed)
            self.layers = nn.ModuleList(Layer() for _ in policies)
            self.norm = nn.RMSNorm(config.embed, config.norm_eps)
            self.head = nn.Linear(config.embed, config.vocab, bias=False)

        def forward(self, tokens, targets):
            x_BLD = self.embedding(tokens).bfloat16()
            for layer, policy in zip(self.layers, policies, strict=True):
                if policy == "none":
                    x_BLD = layer(x_BLD)
                    continue
                more = {"context_fn": contexts[policy]} if policy in contexts else {}
                x_BLD = checkpoint(layer, x_BLD, use_reentrant=False, **more)
            x_BLD, total = self.norm(x_BLD), 0.0
            loss = functools.partial(checkpoint, self.block_loss, use_reentrant=False)
            size = 1024  # Of blocks; smaller ones take longer to compile.
            for block, own in zip(
                x_BLD.split(size, 1), targets.split(size, 1), strict=True
            ):
                total = total + loss(block, own)
            return total / targets.numel()

        def block_loss(self, x_BKD, targets_BK):
            logits = self.head(x_BKD).float().flatten(0, 1)
            return functional.cross_entropy(
                logits, targets_BK.flatten(), reduction="sum"
            )

    return Llama()
