"""Updates: the variables that a loss function changes, and those that it must not.

Running state, such as the statistics of BatchNorm, changes while the model runs.
Parameters change by the optimizer alone.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.arrays import Params
from meshpar.errors import MeshparError
from meshpar.jaxprs.passed_through import passed_through
from meshpar.layouts.param import Param


def check_updates(updates: Params, params: Mapping[str, Param]) -> None:
    """Refuses changes of variables that have to stay as they are.

    Args:
      updates: {path: new value} of the variables that a loss function changed.
      params: {path: Param}.

    Raises:
      MeshparError: a changed parameter, or state that changes its shape or its kind of
        numbers.
    """
    for path, x in updates.items():
        before = params[path]
        if not before.is_state:
            raise MeshparError(
                f"the loss function changes the parameter {path!r}; parameters change "
                "by the optimizer alone. Keep a value that changes otherwise in a "
                "variable that is no parameter: an nnx.Variable, or another collection "
                "in Linen. (nnx.SpectralNorm and nnx.WeightNorm write into the layer "
                "that they wrap; those of Linen do not)"
            )
        after = f"{jnp.asarray(x).dtype}{list(jnp.shape(x))}"
        numbers = jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact)
        same_numbers = numbers == jnp.issubdtype(before.dtype, jnp.inexact)
        if jnp.shape(x) != before.shape or not same_numbers:
            raise MeshparError(
                f"the model changes its variable {path!r} from "
                f"{jnp.dtype(before.dtype).name}{list(before.shape)} to {after}; state "
                "that training carries along keeps its form. Results of one step are "
                "sown (nnx.Module.sow and nnx.pop, Linen's sow or from_linen(sown=...))"
            )


def changed(
    candidates: Params, rerun: Callable[[Params], Params], params: Params
) -> Params:
    """The new values that are not the old ones, handed through.

    Flax puts new tracers into all variables of a module that runs in `nnx.jit` or
    `nnx.remat`; the jaxpr shows which of them are what went in.

    Args:
      candidates: {path: new value}.
      rerun: params -> {path: new value}, for these paths at least; it is traced.
      params: {path: value before}.
    """
    if not candidates:
        return {}
    paths = list(candidates)

    def values(params: Params) -> list[Any]:
        new = rerun(params)
        return [new.get(path, params[path]) for path in paths]

    inputs = {path: params[path] for path in paths}
    jaxpr = jax.make_jaxpr(lambda own: values({**params, **own}))(inputs).jaxpr
    numbers = {path: number for number, path in enumerate(sorted(inputs))}
    return {
        path: candidates[path]
        for path, source in zip(paths, passed_through(jaxpr), strict=True)
        if source != numbers[path]
    }
