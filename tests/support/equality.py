"""Equality of programs with one device, by the step that trains and no other program.

`meshpar.verify` compiles the gradients as a program of their own, which takes as long
as the step. After a step the optimizer's moments hold the gradients: to compare those
proves the same of the program that users run, in half of the time.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from support.drawn_weights import weights_of

from meshpar import TrainProgram
from meshpar.explain import verify as verifying
from meshpar.explain.verify import Group, VerifyReport
from meshpar.lowering.state import TrainState

ADAM_B1 = 0.9


class StepAlone:
    """A program whose gradients are not asked for."""

    def __init__(self, program: TrainProgram) -> None:
        self._program = program

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def gradients(self, state: Any, batch: Any) -> tuple[dict, dict]:
        del state, batch
        return {}, {}


def record(program: TrainProgram, batches: Sequence[Any]) -> list[list[Group]]:
    """All that a program computes in its steps and evaluations."""
    recorded = list(verifying.record(StepAlone(program), batches))
    _check_moments(recorded[1])
    return recorded


def judged(program: TrainProgram, batches: Sequence[Any]) -> list[list[Group]]:
    """All that the judge, a plain loop, computes in these steps and evaluations."""
    steps = verifying.judged(program, batches)
    return [[group for group in step if group.kind != "gradient"] for step in steps]


def compare(
    program: TrainProgram,
    reference: TrainProgram | list[list[Group]] | None,
    batches: Sequence[Any],
) -> VerifyReport:
    """Compares a program with another, with what one did, or with the judge if None."""
    if reference is None:
        reference = judged(program, batches)
    elif isinstance(reference, TrainProgram):
        reference = record(reference, batches)
    _check_moments(reference[1])
    return verifying.verify(StepAlone(program), reference, batches)


def _check_moments(groups: list[Group]) -> None:
    """Asserts that the optimizer has moments, without which gradients go unseen."""
    kept = [x for g in groups if g.kind == "optimizer" for x in g.tensors.values()]
    weights = [x for g in groups if g.kind == "weight" for x in g.tensors.values()]
    assert sum(map(np.size, kept)) >= sum(map(np.size, weights)), "use Adam or momentum"


def start(program: TrainProgram) -> TrainState:
    """The state of seed 0; layouts of one model share its weights."""
    return program.init(0, params=weights_of(program))


def first_step(program: TrainProgram, batch: Any) -> tuple[dict, dict]:
    """Metrics and {path: gradient} of one step of Adam or momentum, without clipping.

    Momentum is the gradient then, Adam's first moment 1 - b1 of it: one compilation
    gives both.
    """
    state, metrics = program.step(start(program), batch)
    moments = jax.device_get(program.in_model_order(state)).optimizer_state[0]
    gradients = getattr(moments, "trace", None)
    if gradients is None:
        part = np.float32(1 - ADAM_B1)
        gradients = {path: x / part for path, x in moments.mu.items()}
    return jax.device_get(metrics), gradients
