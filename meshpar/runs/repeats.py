"""Whether a run's file gives the same again: no clock, no random numbers of its own.

A run that stops goes on with what its file gives then, and processes train together on
what each of them gives. So the function of a file has to depend on its arguments alone.
"""

from collections.abc import Mapping

import jax
import numpy as np

from meshpar.errors import ConfigError, shown
from meshpar.runs.data import digest
from meshpar.runs.run import Run

CAUSES = "a clock, random numbers without a seed, the environment or files that change"
"""What makes a file give something else, in words."""

DATA = "data"
"""The fact that is the fingerprint of the data."""

_PLAIN = ("clip_norm", "units", "length", "flops", "identity", "axis_names")
"""Fields of a run that are compared as they are."""


def facts(run: Run) -> dict[str, str]:
    """{name: text} of the parts of a run, as far as they can be read at once.

    Args:
      run: the run, checked.

    Raises:
      DataError: data that cannot be read.
    """
    found = {
        f"parameter {path}": f"{param.dtype}{list(param.shape)}"
        for path, param in run.model.params.items()
    }
    for path, x in (run.model.given or {}).items():
        found[f"given weight {path}"] = digest([np.ravel(x)[:16]])
    found[DATA] = run.data.fingerprint
    if run.evaluates:
        found["evaluation"] = run.evaluation.fingerprint
    found |= {name: str(getattr(run, name)) for name in _PLAIN}
    if rate := run.learning_rate:
        found["learning_rate"] = str(jax.make_jaxpr(rate)(np.arange(2)))
    return found


def check(recipe: str, before: Mapping[str, str], again: Mapping[str, str]) -> None:
    """Raises ConfigError where the facts of a run that is made again are others.

    Args:
      recipe: names the run.
      before: its facts.
      again: those of the run that is made again.
    """
    names = [x for x in (before | again) if before.get(x) != again.get(x)]
    if not names:
        return
    first, last = (x.get(names[0], "nothing") for x in (before, again))
    others = f", and {len(names) - 1} more differ" if len(names) > 1 else ""
    raise ConfigError(
        f"{recipe} gives something else when it is asked again with the same settings: "
        f"{names[0]}: {shown(first)}, then {shown(last)}{others}. It reads {CAUSES}, "
        "and a run that stops could not go on: make everything from the settings, with "
        "random numbers from a seed, such as np.random.default_rng(seed)"
    )
