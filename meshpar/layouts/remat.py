"""Rematerialization policies: the values that a layer's backward pass may reuse.

    none             all of them
    dots             outputs of matmuls without a batch dim
    experts          rows that were sent to experts, as sent
    names:A+B        values that the model named A and B
    full             none; only the layer's input is kept

A model names a value by `jax.ad_checkpoint.checkpoint_name(x, "A")`.

A mix gives layers policies of their own, in the order in which they run:
`12*full+10*none` is full for the first 12 layers and none for the last 10. `segments`
reads uniform policies and mixes alike.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer
  Models, arXiv:2205.05198; Wang et al., Improving Automatic Parallel Training via
  Balanced Memory Workload Optimization (Galvatron-BMW), arXiv:2307.02031 (policies
  by layer).
"""

import itertools
import re
from collections.abc import Callable
from typing import Any

import jax

from meshpar.compat import equations
from meshpar.errors import LayoutError, nearest, shown
from meshpar.layouts.axes import PIPE

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

_MOST = 999_999
"""Most layers of one term of a mix."""


def canonical_remat(remat: str) -> str:
    """The value of `remat=`; neighbours of a mix that have one policy are merged.

    Raises:
      LayoutError: a policy that does not exist, or a mix that is malformed.
    """
    if remat in (NONE, *REMAT_POLICIES) or all(_names(remat) or [""]):
        return remat
    if not remat.startswith(_NAMES) and re.search(r"[*+]", remat):
        return _canonical_mix(remat)
    known = nearest(shown(remat), [NONE, *REMAT_POLICIES, f"{_NAMES}NAME+NAME"])
    raise LayoutError(f"remat={shown(remat)!r} ({known})")


def _canonical_mix(remat: str) -> str:
    """The canonical form of COUNT*POLICY+COUNT*POLICY."""
    given = f"remat={shown(remat)}"
    for term in remat.split("+"):
        count, _, policy = term.partition("*")
        if not re.fullmatch("0*[1-9][0-9]{0,5}", count):  # Up to _MOST.
            raise LayoutError(
                f"{given}: {shown(term)!r} gives no number of layers from 1 to "
                f"{_MOST}; write COUNT*POLICY, joined by +, such as 12*full+10*none"
            )
        if policy.startswith(_NAMES):
            raise LayoutError(
                f"{given}: {shown(policy)!r} keeps values by name, which has to hold "
                f"for all layers; use {', '.join([NONE, *REMAT_POLICIES])} in a mix"
            )
        if policy not in (NONE, *REMAT_POLICIES):
            known = nearest(shown(policy), [NONE, *REMAT_POLICIES])
            raise LayoutError(f"{given}: {shown(policy)!r} ({known})")
    merged = [
        (policy, sum(count for _, count in group))
        for policy, group in itertools.groupby(_terms(remat), lambda term: term[0])
    ]
    policy, count = max(merged, key=lambda term: term[1])
    if count > _MOST:
        raise LayoutError(
            f"{given} gives {count} layers in a row one policy; use at most {_MOST}"
        )
    if len(merged) == 1:
        raise LayoutError(
            f"{given} gives all {count} layers one policy; write remat={policy}"
        )
    return "+".join(f"{count}*{policy}" for policy, count in merged)


def is_mix(remat: str) -> bool:
    """Whether a value of `remat=` gives layers policies of their own."""
    return "*" in remat and not remat.startswith(_NAMES)


def check_stages(remat: str, num_stages: int) -> None:
    """Raises LayoutError for a mix in a pipeline.

    Args:
      remat: a value of `remat=`.
      num_stages: size of the mesh axis `pipe`.
    """
    if is_mix(remat) and num_stages > 1:
        raise LayoutError(
            f"remat={remat} with {PIPE}={num_stages}: all stages run one loop over "
            "their layers, which has one policy; use one policy for all layers"
        )


def _terms(mix: str) -> list[tuple[str, int]]:
    """[(policy, number of layers)] of a mix."""
    terms = (term.split("*") for term in mix.split("+"))
    return [(policy, int(count)) for count, policy in terms]


def segments(remat: str, depth: int) -> tuple[tuple[str, int], ...]:
    """(policy, number of layers) of consecutive layers, in the order in which they run.

    Args:
      remat: a value of `remat=`.
      depth: number of layers of the stack; a mix gives its own (`reason_depth`).
    """
    return tuple(_terms(remat)) if is_mix(remat) else ((remat, depth),)


def average(remat: str, depth: int, value: Callable[[str], Any]) -> Any:
    """The mean over all layers of value(policy).

    Args:
      remat: a value of `remat=`.
      depth: number of layers of the stack.
      value: a number for each policy, such as the seconds that it computes again.
    """
    if not is_mix(remat):
        return value(remat)
    return sum(count * value(policy) for policy, count in _terms(remat)) / depth


def repeated_share(remat: str, depth: int) -> float:
    """The share of the layers whose backward pass computes anything again.

    Args:
      remat: a value of `remat=`.
      depth: number of layers of the stack.
    """
    return average(remat, depth, lambda policy: float(policy != NONE))


def reason_depth(remat: str, depth: int, pattern: int) -> str:
    """Why a mix does not fit a model; "" if it does.

    Args:
      remat: a value of `remat=`.
      depth: number of layers of the stack.
      pattern: number of the model's own layers that each of them runs.
    """
    named = sum(count for _, count in segments(remat, depth))
    if named == depth:
        return ""
    unit = "layers" if pattern == 1 else f"runs of its pattern of {pattern} layers"
    return (
        f"remat={remat} names {named} {unit}, the model has {depth}; give counts that "
        f"add up to {depth}, or one policy for all of them"
    )


def check_marks(remat: str, jaxpr: Any, is_marked: bool, marks_outside: bool) -> None:
    """Checks that a model has what `remat=` of its layout needs.

    Args:
      remat: a value of `remat=`.
      jaxpr: of the model's loss.
      is_marked: whether its layers are rematerialized.
      marks_outside: whether it marks anything outside the layers of its stack.

    Raises:
      LayoutError: no layer is, a name that the model gives to no value, or a mix and a
        mark that belongs to no layer.
    """
    if marks_outside and is_mix(remat):
        raise LayoutError(
            f"remat={remat} gives layers policies of their own, and the model calls "
            "layouts.remat outside the layers of its stack, where none of them holds; "
            "use one policy for all, or leave layouts.remat out there"
        )
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
      remat: policy of the layer.
      name: of what was sent, by `checkpoint_name`.
    """
    kept = _names(remat)
    kept += [EXPERT_ROWS] * (remat == "experts") + [MATMUL] * (remat in KEEPS_MATMULS)
    return remat != NONE and name not in kept


def wrap_remat(
    layer: Callable, remat: str, transform: Callable = jax.checkpoint, **options: Any
) -> Callable:
    """Wraps a layer as its policy says; "none" returns it as it is.

    Args:
      layer: the function that runs one layer.
      remat: its policy.
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
