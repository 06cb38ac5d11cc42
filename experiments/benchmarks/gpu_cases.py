"""Cases of the benchmark on a GPU: how models are trained, and rows of results."""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments import recipes
from experiments.models.decoder_config import DecoderConfig
from experiments.recipes.config import Config
from meshpar.mesh import chips

RECIPES = "llama-1b", "llama3.2-3b"
LENGTHS = 4096, 8192
TOKENS = 16_384
"""Tokens of a step of the first cases."""
_REHEARSED = dict(vocab=512, depth=2, embed=128, heads=4, kv_heads=2, mlp=256)
_REHEARSED_BY = 32
"""A rehearsal's sequences are shorter by this factor."""
_WARM, _LEAST, _SECONDS = 2, 5, 3.0
ROW = "ROW "
"""Begins a line that holds a row as JSON."""


class Case(NamedTuple):
    """How a model is trained.

    Attributes:
      recipe: of the model.
      length: tokens of a sequence.
      rows: sequences of a step.
      remat: what is computed again, as in a layout.
      unroll: layers that a round of the loop over them runs, as in a layout.
      loss_block: tokens of a sequence whose logits are in memory at once; 0 for all.
      options: of the compiler.
      float8: whether layers multiply by their weights in float8.
    """

    recipe: str
    length: int
    rows: int
    remat: str = "full"
    unroll: int = 1
    loss_block: int = 256
    options: Mapping[str, Any] = {}
    float8: bool = False

    def describe(self) -> str:
        """The case in words, for tables."""
        words = [f"{self.recipe} at {self.length}", f"{self.rows} rows"]
        words += [f"remat={self.remat}", f"loss_block={self.loss_block}"]
        words += [f"scan_unroll={self.unroll}"] * (self.unroll > 1)
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


def first_cases() -> list[Case]:
    """One case for each model and length."""
    return [
        Case(recipe, length, TOKENS // length)
        for recipe in RECIPES
        for length in LENGTHS
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


def emit(**row: Any) -> None:
    """Prints a row for the command that started this process."""
    print(ROW + json.dumps(row), flush=True)


def emit_speed(
    name: str, case: Case, config: Config, seconds: float, kind: str, **more: Any
) -> float:
    """Prints the row of a case that ran, and returns its tokens per second.

    Args:
      name: of the program.
      case: that ran.
      config: of the case.
      seconds: of a step.
      kind: of the device.
      **more: other columns.
    """
    tokens = config.batch_size * config.model.length
    flops, peak = flops_per_token(config.model) * tokens, chips.peak_flops(kind)
    mfu = flops / seconds / peak if peak else None
    emit(
        program=name,
        case=case.describe(),
        status="ok",
        ms=1e3 * seconds,
        tokens_per_second=tokens / seconds,
        mfu=mfu,
        **more,
    )
    return tokens / seconds


def seconds_of_a_step(step: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """The median of a few steps.

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
    return statistics.median(seconds)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that a device has too little memory."""
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


class Budget:
    """The seconds that are left to a part.

    Args:
      seconds: of the whole part, from now on.
    """

    def __init__(self, seconds: float):
        self._end = time.perf_counter() + seconds
        self._longest = 0.0

    def run(self, name: str, case: Case, measure: Callable[[], float]) -> float:
        """Measures a case if it is likely to end in time; says why there is no figure.

        Args:
          name: of the program.
          case: to measure.
          measure: () -> tokens per second; prints the row.

        Returns:
          The tokens per second; 0 if there is no figure.
        """
        begin = time.perf_counter()
        if begin + self._longest > self._end:
            emit(program=name, case=case.describe(), status="no time left")
            return 0.0
        try:
            return measure()
        except Exception as error:
            first = str(error).strip().partition("\n")[0][:300]
            status = "out of memory" if is_out_of_memory(error) else f"failed: {first}"
            emit(program=name, case=case.describe(), status=status)
            return 0.0
        finally:
            self._longest = max(self._longest, time.perf_counter() - begin)
