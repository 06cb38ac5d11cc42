"""Equality of a step on its devices and on others, or with another step.

Both start from the same arrays. The second is run twice, the second time from a state
that is moved by one rounding: what rounding alone makes of a result is no difference.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.errors import MeshparError
from meshpar.explain.judge import moved_by_rounding
from meshpar.explain.verify import Comparison, Group, compare
from meshpar.jaxprs.walk import equations

_TOLERANCES = {"float32": 1e-5, "float64": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}
_RANDOM = ("random_bits", "threefry2x32", "rng_bit_generator", "random_gamma")


@dataclasses.dataclass(frozen=True)
class Equality:
    """The comparison of two runs of a step.

    Attributes:
      judge: what the step was compared with, in words.
      comparisons: of all results, in the order of the steps.
      note: what may explain a difference.
    """

    judge: str
    comparisons: tuple[Comparison, ...]
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether all results are equal within rounding."""
        return all(comparison.ok for comparison in self.comparisons)

    def __str__(self) -> str:
        steps = max((c.step for c in self.comparisons), default=0)
        if self.ok:
            count = len(self.comparisons)
            return f"EQUAL to {self.judge}: {steps} steps, {count} tensors"
        first = next(c for c in self.comparisons if not c.ok)
        note = f"\n    {self.note}" if self.note else ""
        return f"DIFFERENT from {self.judge}: {first}{note}"


def compared(
    step: Callable,
    other: Callable,
    arguments: Sequence[Any],
    other_arguments: Sequence[Any],
    steps: int,
    judge: str,
    jaxpr: Any,
) -> Equality:
    """Runs a step and another one from the same arguments, and compares the results.

    Args:
      step: of the user, compiled for its devices.
      other: the judge: the same step on other devices, or another function.
      arguments: arrays, placed as the user placed them.
      other_arguments: the same numbers, placed for the judge.
      steps: number of steps; from the second on each gets what the first returned.
      judge: in words.
      jaxpr: of the step.

    Raises:
      MeshparError: there are no numbers, or the step does not return its state.
    """
    for leaf in jax.tree.leaves(arguments):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise MeshparError(
                "against= runs the step: give arrays, and no ShapeDtypeStructs"
            )
    own, judged, moved = (
        _copied(arguments),
        _copied(other_arguments),
        _copied(jax.tree.map(_moved, other_arguments)),
    )
    comparisons: list[Comparison] = []
    for number in range(1, steps + 1):
        results = [
            fn(*given) for fn, given in ((step, own), (other, judged), (other, moved))
        ]
        found, wanted, rounded = map(_flat, results)
        comparisons += _comparisons(number, found, wanted, rounded)
        if number < steps:
            own, judged, moved = (
                _following(given, result)
                for given, result in zip((own, judged, moved), results, strict=True)
            )
    return Equality(judge, tuple(comparisons), _note(jaxpr))


def _moved(x: Any) -> Any:
    floating = jnp.issubdtype(getattr(x, "dtype", np.int32), jnp.floating)
    return moved_by_rounding(x) if floating else x


def _copied(tree: Any) -> Any:
    """Copies of arrays, as a step may donate what it gets."""
    return jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, tree)


def _flat(tree: Any) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        f"result{jax.tree_util.keystr(path)}": x
        for path, x in leaves
        if not jax.dtypes.issubdtype(getattr(x, "dtype", np.int32), jax.dtypes.extended)
    }


def _comparisons(
    step: int,
    found: Mapping[str, Any],
    wanted: Mapping[str, Any],
    rounded: Mapping[str, Any],
) -> list[Comparison]:
    if found.keys() != wanted.keys():
        raise MeshparError(
            f"the judge returns {sorted(wanted)}, and the step {sorted(found)}"
        )
    comparisons = []
    for path, x in found.items():
        tolerance = _TOLERANCES.get(str(x.dtype), 0.0)
        own, right, moved = (
            np.asarray(jax.device_get(y)).astype(np.float64)
            for y in (x, wanted[path], rounded[path])
        )
        if own.shape != right.shape:
            raise MeshparError(
                f"{path} has shape {own.shape}, and {right.shape} from the judge"
            )
        spread = {path: float(np.linalg.norm(moved - right))}
        group = Group("result", {path: right}, spread)
        comparisons += compare(step, {path: own}, group, tolerance)
    return comparisons


def _following(arguments: Sequence[Any], result: Any) -> list[Any]:
    """The arguments of the next step: what a step returns, by its structure.

    Raises:
      MeshparError: it returns none of its arguments anew.
    """
    parts = list(result) if isinstance(result, tuple | list) else [result]
    following, used = [], 0
    for argument in arguments:
        place = next(
            (i for i, part in enumerate(parts[used:], used) if _alike(argument, part)),
            None,
        )
        following.append(argument if place is None else parts[place])
        used = used if place is None else place + 1
    if not used:
        raise MeshparError(
            "steps=2 and more hand the first results back as arguments, and the step "
            "returns none of them anew: use steps=1"
        )
    return following


def _alike(one: Any, other: Any) -> bool:
    """Whether two trees have the same structure and shapes."""
    same = jax.tree.structure(one) == jax.tree.structure(other)
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=False)
    return same and all(np.shape(x) == np.shape(y) for x, y in leaves)


def _note(jaxpr: Any) -> str:
    """Possible reasons for a difference of a step."""
    random = jaxpr is not None and any(
        eqn.primitive.name.startswith(_RANDOM) for eqn in equations(jaxpr)
    )
    if random and not jax.config.jax_threefry_partitionable:
        return (
            "the step draws random numbers, and these depend on the sharding unless "
            "jax_threefry_partitionable is on"
        )
    if random:
        return (
            "the step draws random numbers: inside shard_map every device draws its "
            "own, unless keys are folded with the position of the rows"
        )
    return "sums over devices run in another order: that alone is within the tolerance"
