"""The same Llama and training step in PyTorch, compiled, as a yardstick on one GPU.

torch.compile, flash attention, autocast to bfloat16, checkpointed layers, fused Adam.
"""

import functools
from typing import Any

import numpy as np

from experiments.benchmarks.gpu_cases import (
    Budget,
    Case,
    emit,
    emit_speed,
    random_batch,
    seconds_of_a_step,
)
from experiments.models.decoder_config import DecoderConfig

PROGRAM = "torch.compile"


def run(cases: list[Case], rehearsal: bool, budget: Budget) -> None:
    """Prints a row for each case, or one that says why there is none."""
    try:
        import torch
    except ImportError:
        emit(program=PROGRAM, case="", status="torch is not installed")
        return
    if not torch.cuda.is_available() and not rehearsal:
        emit(program=PROGRAM, case="", status="torch sees no GPU")
        return
    for case in cases:
        budget.run(PROGRAM, case, functools.partial(_measure, torch, case, rehearsal))
        torch.compiler.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _measure(torch: Any, case: Case, rehearsal: bool) -> float:
    config = case.config(rehearsal)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = _model(torch, config.model, case.remat).to(device)
    fused = device == "cuda"
    optimizer = torch.optim.Adam(model.parameters(), 3e-4, (0.9, 0.95), fused=fused)
    batch = {
        name: torch.from_numpy(np.asarray(x, np.int64)).to(device)
        for name, x in random_batch(config).items()
    }

    @torch.compile
    def loss_fn() -> Any:
        with torch.autocast(device, torch.bfloat16):
            return model(batch["tokens"], batch["targets"])

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn()
        loss.backward()
        optimizer.step()
        return loss.detach()

    first = step().item()
    seconds = seconds_of_a_step(step, lambda loss: loss.item())
    kind, peak = "cpu", None
    if device == "cuda":
        kind = torch.cuda.get_device_name()
        peak = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
    more = {"first_loss": first, "peak_gb": peak}
    return emit_speed(PROGRAM, case, config, seconds, kind, **more)


def _model(torch: Any, config: DecoderConfig, remat: str) -> Any:
    """A Llama as a torch module: (tokens, targets) -> mean loss."""
    nn, functional = torch.nn, torch.nn.functional
    head_dim = config.embed // config.heads

    def rotate(x_BNLH: Any) -> Any:
        half = head_dim // 2
        places = torch.arange(half, device=x_BNLH.device)
        frequency = config.rope_theta ** (-places / half)
        angle = torch.arange(x_BNLH.shape[2], device=x_BNLH.device)[:, None] * frequency
        sin, cos = angle.sin(), angle.cos()
        a, b = x_BNLH.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_BNLH.dtype)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            linear = functools.partial(nn.Linear, bias=False)
            embed, keys = config.embed, config.kv_heads * head_dim
            self.norms = nn.ModuleList(
                nn.RMSNorm(embed, config.norm_eps) for _ in range(2)
            )
            self.q, self.o = linear(embed, embed), linear(embed, embed)
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
            nn.init.normal_(self.embedding.weight, std=0.02)
            self.layers = nn.ModuleList(Layer() for _ in range(config.depth))
            self.norm = nn.RMSNorm(config.embed, config.norm_eps)
            self.head = nn.Linear(config.embed, config.vocab, bias=False)
            if config.tied:
                self.head.weight = self.embedding.weight

        def forward(self, tokens, targets):
            x_BLD = self.embedding(tokens)
            for layer in self.layers:
                if remat == "none":
                    x_BLD = layer(x_BLD)
                else:
                    x_BLD = torch.utils.checkpoint.checkpoint(
                        layer, x_BLD, use_reentrant=False
                    )
            logits = self.head(self.norm(x_BLD)).float()
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Llama()
