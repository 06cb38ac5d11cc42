"""`check`: the traffic, the memory and the mistakes of a compiled step."""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from meshpar.checker.elsewhere import on_mesh, on_topology
from meshpar.checker.equality import Equality, compared
from meshpar.checker.report import Report
from meshpar.checker.rules import findings_of
from meshpar.checker.steps import CompiledStep, MeshLike
from meshpar.errors import MeshparError

ONE_DEVICE = "one device"


def check(
    step: Any,
    *arguments: Any,
    mesh: MeshLike | None = None,
    topology: str | None = None,
    against: str | jax.sharding.Mesh | Callable | None = None,
    steps: int = 1,
    threshold: float | int = 0.01,
    **keywords: Any,
) -> Report:
    """Checks a step of any jax program: its traffic, its memory, its mistakes.

    The step is compiled; it runs only to be compared with `against`.

    Args:
      step: a jitted function, also one with shard_map inside; a Traced, Lowered or
        Compiled; or the text of a compiled program, with `mesh`.
      *arguments: of the step: arrays, or ShapeDtypeStructs with shardings.
      mesh: on which the step runs, as a Mesh or as {axis: size} from outer to inner;
        by default that of the arguments or of the step.
      topology: chips that are not there, such as "v5p:4x4x4": the step is compiled for
        them in place of its own devices, as many as these.
      against: "one device", another mesh with the same axes, or a function of the same
        arguments that is the judge: the step runs, and its results are compared.
      steps: of the comparison.
      threshold: findings below are left out: a share of the bytes that the step moves,
        or of its memory, if it is below 1; else bytes.
      **keywords: keyword arguments of the step.

    Returns:
      The report; print it.

    Raises:
      MeshparError: the step is not jitted, or nothing names its mesh; with the remedy.
    """
    given = step, arguments, keywords
    if topology is not None:
        traced = _traced(*given, "topology=")
        given = on_topology(step, traced, arguments, keywords, topology)
    compiled = CompiledStep.of(*given)
    with _no_search_for_circles():
        facts = compiled.facts(mesh, given[1:])
        findings = findings_of(facts)
    equality = None
    if against is not None:
        equality = _compared(step, arguments, keywords, against, steps)
    return Report(facts, findings, threshold, equality)


@contextlib.contextmanager
def _no_search_for_circles() -> Iterator[None]:
    """Keeps Python from looking for circles among objects that all stay.

    A text of 100 MB makes millions of them, and the search takes a quarter of the time.
    """
    searches = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searches:
            gc.enable()


def _traced(
    step: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], why: str
) -> jax.stages.Traced:
    """The trace of a step, which only a jitted function has.

    Raises:
      MeshparError: the step is given in another form.
    """
    traced = step.trace(*arguments, **keywords) if hasattr(step, "trace") else None
    if not isinstance(traced, jax.stages.Traced):
        raise MeshparError(
            f"{why} needs the step as a function under jax.jit, with its arguments: a "
            "program that is lowered or compiled has its devices written into it, and "
            "nnx.jit its modules"
        )
    return traced


def _compared(
    step: Any,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    against: str | jax.sharding.Mesh | Callable,
    steps: int,
) -> Equality:
    """The comparison of a step with its judge."""
    traced = _traced(step, arguments, keywords, "against=")
    named = functools.partial(step, **keywords)
    if isinstance(against, jax.sharding.Mesh):
        judge = f"the same step on {dict(against.shape)}"
        other, placed = on_mesh(step, traced, arguments, keywords, against)
    elif against == ONE_DEVICE:
        judge = "the same step on one device"
        other, placed = on_mesh(step, traced, arguments, keywords)
    elif callable(against):
        judge = f"{getattr(against, '__name__', 'the function')} on one device"
        other, first = functools.partial(against, **keywords), jax.devices()[0]
        placed = jax.device_put(arguments, first)
    else:
        raise MeshparError(
            f"against={against!r}: write {ONE_DEVICE!r}, or give a mesh or a function"
        )
    jaxpr = traced.jaxpr.jaxpr
    return compared(named, other, arguments, placed, steps, judge, jaxpr)
