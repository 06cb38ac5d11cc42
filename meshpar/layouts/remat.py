"""Rematerialization policies: the values that a layer's backward pass may reuse.

    none             all of them
    dots             outputs of matmuls without a batch dim
    experts          rows that were sent to experts, as sent
    names:A+B        values that the model named A and B
    full             none; only the layer's input is kept

A model names a value by `jax.ad_checkpoint.checkpoint_name(x, "A")`.
"""

from collections.abc import Callable
from typing import Any

import jax

from meshpar.compat import equations
from meshpar.errors import LayoutError, nearest, shown

EXPERT_ROWS = "expert_rows"
"""Name of what a device receives for its experts (`ops.experts`)."""

MATMUL = "matmul"
"""Name of the result of a matmul that no policy sees (`ops.tensor_parallel`)."""

KEEPS_MATMULS = ("dots",)
"""Values of `remat=` that keep the results of matmuls."""


def _matmuls() -> Any:
    policies = jax.checkpoint_policies
    return policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable,
        policies.save_only_these_names(MATMUL),
    )


NONE = "none"
REMAT_POLICIES: dict[str, Callable[[], Any]] = {
    "full": lambda: jax.checkpoint_policies.nothing_saveable,
    "dots": _matmuls,
    "experts": lambda: jax.checkpoint_policies.save_only_these_names(EXPERT_ROWS),
}
"""{value of remat=: function that makes the policy}; remat=none wraps nothing."""

_NAMES = "names:"


def check_remat(remat: str) -> None:
    """Raises LayoutError for a value of `remat=` that does not exist."""
    if remat in (NONE, *REMAT_POLICIES) or all(_names(remat) or [""]):
        return
    known = nearest(shown(remat), [NONE, *REMAT_POLICIES, f"{_NAMES}NAME+NAME"])
    raise LayoutError(f"remat={shown(remat)!r} ({known})")


def check_marks(remat: str, jaxpr: Any, is_marked: bool) -> None:
    """Checks that a model has what `remat=` of its layout needs.

    Args:
      remat: a value of `remat=`.
      jaxpr: of the model's loss.
      is_marked: whether its layers are rematerialized.

    Raises:
      LayoutError: no layer is, or a name that the model gives to no value.
    """
    if remat != NONE and not is_marked:
        raise LayoutError(
            f"remat={remat}: the model has no rematerialization point; wrap its layer "
            "in layouts.remat(layer)"
        )
    if names := _names(remat):
        named = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "name")
        given = {eqn.params["name"] for eqn in named}
        for name in names:
            if name not in given:
                known = nearest(name, given) if given else "it names none"
                raise LayoutError(
                    f"remat={remat}: the model gives no value the name {name!r} "
                    f"({known}); name one by jax.ad_checkpoint.checkpoint_name"
                )


def _names(remat: str) -> list[str]:
    """The names that a value of `remat=` lists."""
    return remat.removeprefix(_NAMES).split("+") if remat.startswith(_NAMES) else []


def moves_again(remat: str, name: str) -> bool:
    """Whether the backward pass moves once more what a layer was sent.

    Args:
      remat: a value of `remat=`.
      name: of what was sent, by `checkpoint_name`.
    """
    kept = _names(remat)
    kept += [EXPERT_ROWS] * (remat == "experts") + [MATMUL] * (remat in KEEPS_MATMULS)
    return remat != NONE and name not in kept


def wrap_remat(
    layer: Callable, remat: str, transform: Callable = jax.checkpoint, **options: Any
) -> Callable:
    """Wraps a layer as `remat=` of a layout says; "none" returns it as it is.

    Args:
      layer: the function that runs one layer.
      remat: a value of `remat=`.
      transform: a checkpoint transformation that takes ``policy=``.
      **options: other options of the transformation.
    """
    if remat == NONE:
        return layer
    if names := _names(remat):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
    else:
        policy = REMAT_POLICIES[remat]()
    return transform(layer, policy=policy, **options)
