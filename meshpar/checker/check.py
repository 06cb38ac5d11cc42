"""`check`: what a compiled step moves and holds, and what is amiss in it."""

from typing import Any

from meshpar.checker.report import Report
from meshpar.checker.rules import findings_of
from meshpar.checker.steps import CompiledStep, MeshLike


def check(
    step: Any,
    *arguments: Any,
    mesh: MeshLike | None = None,
    threshold: float | int = 0.01,
    **keywords: Any,
) -> Report:
    """Checks a step of any jax program: its traffic, its memory, what is amiss.

    The step is compiled and not run.

    Args:
      step: a jitted function, also one with shard_map inside; a Traced, Lowered or
        Compiled; or the text of a compiled program, with `mesh`.
      *arguments: of the step: arrays, or ShapeDtypeStructs with shardings.
      mesh: on which the step runs, as a Mesh or as {axis: size} from outer to inner;
        by default that of the arguments or of the step.
      threshold: findings below are left out: a share of the bytes that the step moves,
        or of its memory, if it is below 1; else bytes.
      **keywords: keyword arguments of the step.

    Returns:
      The report; print it.

    Raises:
      MeshparError: the step is not jitted, or nothing names its mesh; with the remedy.
    """
    compiled = CompiledStep.of(step, arguments, keywords)
    facts = compiled.facts(mesh, (arguments, keywords))
    return Report(facts, findings_of(facts), threshold)
