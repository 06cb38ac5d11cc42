"""The optimizers of recipes: AdamW or Muon, warm-up, cosine decay and clipping."""

import dataclasses
from typing import Annotated, Any

import optax
from flax import traverse_util

import meshpar
from experiments.recipes import muon
from meshpar.layouts.param import follows_load
from meshpar.ops import experts
from meshpar.runs.modes import MAX_STEPS
from meshpar.settings import LARGEST, SMALLEST, Choice, Number, real


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon with linear warm-up, cosine decay and global-norm clipping.

    Attributes:
      name: adamw, or muon for the matrices of layers and AdamW for all else.
      learning_rate: largest learning rate, at the end of the warm-up.
      warmup_steps: steps in which the learning rate rises to its peak.
      final_fraction: learning rate at the last step, as a fraction of the peak.
      b1: decay of the mean of gradients (first moment), per step.
      b2: decay of the mean of squared gradients (second moment), per step.
      eps: added to the root of the second moment, by which updates are divided.
      momentum: decay of Muon's running sum of gradients, per step.
      weight_decay: weight matrices shrink by this times the learning rate in a step;
        biases and norms do not.
      clip_norm: gradients are scaled down to this norm over all tensors; 0 for no
        limit.
      router_bias_rate: change of the biases that balance experts (`model.router_bias`)
        in a step.
    """

    name: Annotated[str, Choice(("adamw", "muon"))] = "adamw"
    learning_rate: Annotated[float, real(0, LARGEST)] = 4e-3
    warmup_steps: Annotated[int, Number(0, MAX_STEPS, "steps")] = 20
    final_fraction: Annotated[float, real(0, 1)] = 0.1
    b1: Annotated[float, real(0, 1, below=True)] = 0.9
    b2: Annotated[float, real(0, 1, below=True)] = 0.95
    eps: Annotated[float, real(SMALLEST, 1e6)] = 1e-8
    momentum: Annotated[float, real(0, 1, below=True)] = 0.95
    weight_decay: Annotated[float, real(0, 1e6)] = 0.1
    clip_norm: Annotated[float, real(0, LARGEST, note="0 for no limit")] = 1.0
    router_bias_rate: Annotated[float, real(0, 1e6)] = 0.001


def learning_rates(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up, then cosine decay to `final_fraction` at the last step."""
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (config.warmup_steps + 1),
        peak_value=config.learning_rate,
        warmup_steps=min(config.warmup_steps, steps),
        decay_steps=max(steps, config.warmup_steps + 1),
        end_value=config.learning_rate * config.final_fraction,
    )


def make_optimizer(
    config: OptimizerConfig, steps: int, model: meshpar.Model
) -> optax.GradientTransformation:
    """AdamW or Muon with weight decay for parameters of two dims or more.

    The dim over which layers are stacked does not count. Biases that balance experts
    follow the loads.
    """

    def decays(path: tuple, x: Any) -> bool:
        param = model.params.get("/".join(map(str, path)))
        if param is None:  # One layer of a stack, as the model itself has it.
            return x.ndim >= 2
        stacked = param.names is not None and "layers" in param.names
        return len(param.shape) - stacked >= 2

    rates = learning_rates(config, steps)
    optimizer = optax.adamw(
        rates,
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=lambda params: traverse_util.path_aware_map(decays, params),
    )
    if config.name == "muon":
        matrices = muon.muon(rates, config.momentum, config.weight_decay, model)
        each = {"muon": matrices, "adamw": optimizer}
        optimizer = optax.multi_transform(each, muon.labels(model))
    if not any(follows_load(param.names) for param in model.params.values()):
        return optimizer
    return experts.balanced(optimizer, model, config.router_bias_rate)
