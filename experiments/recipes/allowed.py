"""The range of every field of `Config`, in one table.

A value outside of its range is an error where it enters: a setting, a recipe, the
configuration in a checkpoint or an imported model. Bounds are generous: they refuse
what no run can mean or no machine can hold.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.data import MAX_VOCABULARY
from experiments.models.decoder_config import CHOICES
from experiments.recipes.errors import ConfigError
from experiments.recipes.modes import GOSSIP, MERGES, MODES, OUTERS
from experiments.recipes.ranges import (
    Choice,
    Number,
    Path,
    Range,
    Switch,
    Text,
    Wire,
)
from meshpar.compose import LOWERINGS
from meshpar.errors import shown
from meshpar.islands import mode as islands
from meshpar.layouts.grammar import LONGEST

MAX_STEPS = 2**24
"""Most steps of a run; learning rates count steps in float32, exactly up to here."""

_SMALLEST, _LARGEST = 1e-30, 3e38
"""Positive numbers that float32 holds, and so do their inverses or squares alone."""


def _real(
    low: float, high: float, unit: str = "", note: str = "", **bounds: bool
) -> Number:
    return Number(low, high, unit, note, whole=False, **bounds)


_MODEL: dict[str, Range] = {
    "vocab": Number(0, MAX_VOCABULARY, "token ids", "0 takes those of the data"),
    "length": Number(1, 2**24, "tokens"),
    "depth": Number(1, 10_000, "layers"),
    "embed": Number(1, 2**20),
    "heads": Number(1, 2**14, "heads"),
    "kv_heads": Number(1, 2**14, "heads"),
    "head_width": Number(0, 2**14, note="0 for embed / heads"),
    "qk_norm": Switch(),
    "mlp": Number(1, 2**22),
    "bias": Switch(),
    "tied": Switch(),
    "float8": Switch(),
    "dropout": _real(0, 1, below=True),
    "rope_theta": _real(1, 1e12),
    "norm_eps": _real(_SMALLEST, 1),
    "init_std": _real(0, 100, note="0 for 1/sqrt(fan_in)"),
    "window": Number(0, 2**24, "tokens", "0 for whole sequences"),
    "global_every": Number(0, 10_000, "layers", "0 for none"),
    "loss_block": Number(0, 2**24, "tokens", "0 for all at once"),
    "num_experts": Number(0, 2**14, "experts", "0 for a dense model"),
    "experts_per_token": Number(1, 2**10, "experts"),
    "shared_experts": Number(0, 2**10, "experts"),
    "capacity_factor": _real(0, 1e6, above=True),
    "routing_group": Number(0, 2**24, "tokens", "0 for the whole sequence"),
    "exchange_bound": _real(0, 1e6, note="0 for no bound"),
    "normalize_weights": Switch(),
    "weight_scale": _real(0, 1e6, above=True),
    "router_nodes": Number(1, 2**10, "groups of experts"),
    "nodes_per_token": Number(1, 2**10, "groups of experts"),
    "router_bias": Switch(),
    "router_jitter": _real(0, 1, below=True),
    "balance_loss": _real(0, 1e6),
    "z_loss": _real(0, 1e6),
    **{name: Choice(words) for name, words in CHOICES.items()},
}

_OPTIMIZER: dict[str, Range] = {
    "learning_rate": _real(0, _LARGEST),
    "warmup_steps": Number(0, MAX_STEPS, "steps"),
    "final_fraction": _real(0, 1),
    "b1": _real(0, 1, below=True),
    "b2": _real(0, 1, below=True),
    "eps": _real(_SMALLEST, 1e6),
    "weight_decay": _real(0, 1e6),
    "clip_norm": _real(0, _LARGEST, note="0 for no limit"),
    "router_bias_rate": _real(0, 1e6),
}

_LOCAL_SGD: dict[str, Range] = {
    "period": Number(1, 2 * MAX_STEPS, "steps"),
    "warmup_steps": Number(0, MAX_STEPS, "steps"),
    "staleness": Number(0, MAX_STEPS, "steps"),
    "fragments": Number(1, 2**16, "fragments"),
    "outer": Choice(tuple(OUTERS)),
    "outer_learning_rate": _real(0, _LARGEST),
    "outer_momentum": _real(0, 1, below=True),
    "merge": Choice(tuple(MERGES)),
    "merge_weight": _real(0, 1),
    "wire": Wire(),
    "error_feedback": Switch(),
    "gossip": Choice(GOSSIP),
    "damping": _real(0, 100),
}

_ISLANDS: dict[str, Range] = {
    "workers": Number(1, 2**16, "islands"),
    "algorithm": Choice(islands.GRADIENTS + islands.WEIGHTS),
    "consistency": Text(40),
    "fetch": Number(1, MAX_STEPS, "steps"),
    "push": Number(1, MAX_STEPS, "steps"),
    "server_optimizer": Choice(islands.SERVER_OPTIMIZERS),
    "learning_rate": _real(0, _LARGEST),
    "momentum": _real(0, 1, below=True),
    "local_learning_rate": _real(0, _LARGEST),
    "alpha": _real(0, 1),
    "compensation": _real(0, 1e6),
    "warm_start": Number(0, MAX_STEPS, "steps"),
    "quorum": Number(0, 2**16, "islands", "0 for the rule of the consistency"),
    "grace": _real(0, 1e6, "seconds"),
    "wire": Wire(),
    "error_feedback": Switch(),
    "servers": Number(1, 2**12, "servers"),
    "replicas": Number(1, 2**12, "servers"),
    "ranges": Number(1, 2**16, "ranges"),
    "host": Choice(islands.HOSTS),
}

_WATCHDOG: dict[str, Range] = {
    section: _real(0, 1e7, "seconds", "0 for never")
    for section in ("start", "first_step", "evaluation", "save", "end")
}

_DATA: dict[str, Range] = {
    "path": Path(),
    "tokenizer": Path(),
    "held_out": _real(0, 1, note="a fraction of the tokens", above=True, below=True),
    "pack": Switch(),
    "separator": Number(-1, MAX_VOCABULARY, "", "-1 for none"),
}


def _under(group: str, ranges: Mapping[str, Range]) -> dict[str, Range]:
    return {f"{group}.{name}": allowed for name, allowed in ranges.items()}


RANGES: dict[str, Range] = {
    "recipe": Text(200),
    "framework": Choice(("nnx", "linen")),
    **_under("model", _MODEL),
    **_under("optimizer", _OPTIMIZER),
    "optimizer_mode": Choice(tuple(MODES)),
    **_under("local_sgd", _LOCAL_SGD),
    **_under("islands", _ISLANDS),
    **_under("data", _DATA),
    "layout": Text(LONGEST),
    "lowering": Choice(("", "auto", *LOWERINGS)),
    "compute_dtype": Choice(("float32", "bfloat16")),
    "batch_size": Number(1, 2**24, "sequences"),
    "steps": Number(1, MAX_STEPS, "steps"),
    "seed": Number(0, 2**32 - 1),
    "evaluate_every": Number(1, 10**9, "steps"),
    "evaluation_batches": Number(1, 10**6, "batches"),
    "checkpoint_every": Number(1, 10**9, "steps"),
    "keep_checkpoints": Number(1, 10**6, "checkpoints"),
    "checkpoint_local_dir": Path(),
    "checkpoint_local_every": Number(0, 10**9, "steps", "0 for checkpoint_every"),
    "sample_tokens": Number(0, 2**20, "tokens", "0 for no sample"),
    "watchdog_seconds": _real(0, 1e7, "seconds", "0 for never"),
    **_under("watchdog", _WATCHDOG),
    "workdir": Path(),
}
"""{key of `--set`: its range}."""


def check(key: str, value: Any, text: str | None = None) -> None:
    """Raises ConfigError, with the remedy, for a value outside of its range.

    Args:
      key: a key of `RANGES`.
      value: the value, of any type.
      text: the value as it was written, for the message; Python's by default.
    """
    if problem := RANGES[key].problem(value):
        written = repr(value) if text is None else text
        raise ConfigError(f"{key}={shown(written)}: {problem}")


def check_all(config: Any) -> None:
    """Raises ConfigError for the first field outside of its range."""
    for key, value in fields_of(config):
        check(key, value)


def fields_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of every field of a dataclass and of those inside it."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value
