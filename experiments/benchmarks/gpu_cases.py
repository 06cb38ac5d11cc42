"""Cases of the benchmark on a GPU: how models are trained, and rows of results."""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments import recipes
from experiments.models.decoder_config import DecoderConfig
from experiments.recipes.config import Config
from meshpar.layouts import mixes
from meshpar.mesh import chips

SMALL, LARGE = RECIPES = "llama-1b", "llama3.2-3b"
LENGTH = 4096
_REHEARSED = dict(vocab=512, depth=2, embed=128, heads=4, kv_heads=2, mlp=256)
"""The model of a rehearsal."""
_REHEARSED_BY = 32
"""A rehearsal's sequences are shorter by this factor."""
_WARM, _LEAST, _SECONDS = 2, 5, 3.0
ROW = "ROW "
"""Begins a line that holds a row as JSON."""


class Case(NamedTuple):
    """A model, and the settings with which it is trained.

    Attributes:
      recipe: of the model.
      length: tokens of a sequence.
      rows: sequences of a step.
      remat: what is computed again, as in a layout.
      unroll: layers that a round of the loop over them runs, as in a layout.
      loss_block: tokens of a sequence whose logits are in memory at once; 0 for all.
      options: of the compiler.
      float8: whether layers multiply by their weights in float8.
      microbatches: of a step, as in a layout.
    """

    recipe: str
    length: int
    rows: int
    remat: str = "full"
    unroll: int = 1
    loss_block: int = 256
    options: Mapping[str, Any] = {}
    float8: bool = False
    microbatches: int = 1

    def rehearsed(self) -> "Case":
        """The case for a rehearsal's model: of a mix, one layer for each policy."""
        depth = _REHEARSED["depth"]
        policies = [policy for policy, _ in mixes.segments(self.remat, depth)]
        remat = mixes.written([(policies[0], 1), (policies[-1], depth - 1)])
        return self._replace(remat=remat, unroll=min(self.unroll, depth))

    @property
    def layout(self) -> str:
        """The layout of meshpar."""
        options = f"remat={self.remat},scan_unroll={self.unroll}"
        return f"data=1,microbatches={self.microbatches},{options}"

    def describe(self) -> str:
        """The case in words, for tables."""
        words = [f"{self.recipe} at {self.length}", f"{self.rows} rows"]
        words += ["float8"] * self.float8
        words += [f"remat={self.remat}", f"loss_block={self.loss_block}"]
        words += [f"scan_unroll={self.unroll}"] * (self.unroll > 1)
        words += [f"microbatches={self.microbatches}"] * (self.microbatches > 1)
        return ", ".join([*words, *(f"{k}={v!r}" for k, v in self.options.items())])

    def config(self, rehearsal: bool) -> Config:
        """The run; a rehearsal's model is tiny."""
        config = dataclasses.replace(recipes.get(self.recipe), steps=1000)
        changes: dict[str, Any] = {"length": self.length, "loss_block": self.loss_block}
        if rehearsal:
            changes = {**_REHEARSED, "length": self.length // _REHEARSED_BY}
            changes["loss_block"] = self.loss_block // _REHEARSED_BY
        model = dataclasses.replace(config.model, **changes)
        model = dataclasses.replace(model, float8=self.float8)
        return dataclasses.replace(config, model=model, batch_size=self.rows)


def best_cases(memory_gb: float) -> list[Case]:
    """The settings that are best for each model on a card; the larger model first.

    Args:
      memory_gb: of the card.
    """
    # What `meshpar plan` takes first (tests/planner/measured_gpus_test.py).
    if memory_gb > 120:
        large, small = (8, "none"), (16, "none")
    else:
        large, small = (4, "dots"), (8, "none")
    return [Case(LARGE, LENGTH, *large, 28), Case(SMALL, LENGTH, *small, 22)]


def same_cases() -> list[Case]:
    """Settings under which all programs fit into 80 GB, for comparisons."""
    return [Case(LARGE, LENGTH, 4), Case(SMALL, LENGTH, 8, "dots")]


def other_cases(best: Sequence[Case]) -> list[Case]:
    """Changes of the best cases, each of which shows the effect of one setting."""
    large, small = best
    return [
        large._replace(remat="full" if large.remat == "dots" else "dots"),
        small._replace(remat="dots"),
        small._replace(remat="dots", unroll=1),
        small._replace(remat="attention"),
        small._replace(rows=2 * small.rows, microbatches=2),
        small._replace(loss_block=1024),
        small._replace(length=2 * LENGTH, rows=small.rows // 2),
        small._replace(options={"xla_gpu_enable_command_buffer": ""}),
        large._replace(length=2 * LENGTH, rows=large.rows // 2),
    ]


def random_batch(config: Config) -> dict[str, np.ndarray]:
    """Tokens and targets, the same in every process."""
    shape = config.batch_size, config.model.length + 1
    ids = np.random.default_rng(0).integers(0, config.model.vocab, shape, np.int32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


def flops_per_token(model: DecoderConfig) -> float:
    """6 for each weight of a matmul, and causal attention, which sees half the length.

    Forward and backward; what is computed again does not count.
    """
    return dataclasses.replace(model, length=model.length // 2).flops_per_token()


class Times(NamedTuple):
    """Seconds of a few steps: their median, the shortest and the longest."""

    median: float
    least: float
    most: float


def emit(**row: Any) -> None:
    """Prints a row for the command that started this process."""
    print(ROW + json.dumps(row), flush=True)


def emit_speed(
    name: str, case: Case, config: Config, times: Times, kind: str, **more: Any
) -> None:
    """Prints the row of a case that ran.

    Args:
      name: of the program.
      case: that ran.
      config: of the case.
      times: of a step.
      kind: of the device.
      **more: other columns.
    """
    tokens = config.batch_size * config.model.length
    flops, peak = flops_per_token(config.model) * tokens, chips.peak_flops(kind)
    seconds = times.median
    mfu = flops / seconds / peak if peak else None
    emit(
        program=name,
        case=case.describe(),
        batch=f"{case.recipe}, {case.length} x {case.rows}",
        status="ok",
        ms=1e3 * seconds,
        ms_least=1e3 * times.least,
        ms_most=1e3 * times.most,
        spread=(times.most - times.least) / seconds,
        tokens_per_second=tokens / seconds,
        mfu=mfu,
        **more,
    )


def times_of_a_step(step: Callable[[], Any], wait: Callable[[Any], Any]) -> Times:
    """Times of a few steps.

    Args:
      step: starts one.
      wait: waits for what it returned.
    """
    for _ in range(_WARM):
        wait(step())
    seconds: list[float] = []
    while len(seconds) < _LEAST or sum(seconds) < _SECONDS:
        begin = time.perf_counter()
        wait(step())
        seconds.append(time.perf_counter() - begin)
        if sum(seconds) > 2 * _SECONDS:
            break
    return Times(statistics.median(seconds), min(seconds), max(seconds))


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that a device has too little memory."""
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()
