"""Rematerialization policies: the values that a layer's backward pass may reuse.

    none             all of them
    dots             outputs of matmuls without a batch dim, and what the forward kernel
                     of attention gives (cuDNN on GPUs, splash on TPUs)
    attention        outputs of attention, and what else the derivative of its kernel
                     reads
    experts          rows that were sent to experts, as sent
    names:A+B        values that the model named A and B
    full             none; only the layer's input is kept

A model names a value by `jax.ad_checkpoint.checkpoint_name(x, "A")`.

A mix gives layers policies of their own, in the order in which they run:
`12*full+10*none` is full for the first 12 layers and none for the last 10 (`mixes`).

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer
  Models, arXiv:2205.05198; Wang et al., Improving Automatic Parallel Training via
  Balanced Memory Workload Optimization (Galvatron-BMW), arXiv:2307.02031 (policies
  by layer).
"""

import re
from collections.abc import Callable, Collection
from typing import Any

import jax

from meshpar.errors import LayoutError, nearest, shown
from meshpar.jaxprs.walk import equations
from meshpar.layouts.mixes import average, canonical_mix, is_mix, segments

EXPERT_ROWS = "expert_rows"
"""Name of what a device receives for its experts (`ops.experts`)."""

MATMUL = "matmul"
"""Name of the result of a matmul that no policy sees (`ops.tensor_parallel`)."""

ATTENTION, CUDNN, SPLASH = "attention", "attention_cudnn", "attention_splash"
"""Names of the outputs of attention, of three forms of it (`ops.attention_kernels`),
and of the statistics that its own derivative reads. With them its kernel does not run
again."""

SPLASH_INPUTS = "attention_splash_inputs"
"""Name of the padded copies of queries, keys and values that splash reads."""

_ATTENTION_NAMES = ATTENTION, CUDNN, SPLASH, SPLASH_INPUTS

KEEPS_MATMULS = ("dots",)
"""Values of `remat=` that keep the results of matmuls."""

_KEPT_NAMES = {
    "full": (),
    "dots": (MATMUL, CUDNN, SPLASH),
    "attention": _ATTENTION_NAMES,
    "experts": (EXPERT_ROWS,),
}
"""{policy: names of the values that it keeps}."""

_NEEDED_NAMES = {"attention": ATTENTION, "experts": EXPERT_ROWS}
"""{policy: the name of values without which it keeps nothing}."""


def _policy_of(remat: str) -> Callable[..., bool]:
    """The rematerialization policy of jax."""
    policies = jax.checkpoint_policies
    named = policies.save_only_these_names(*_kept_names(remat))
    if remat not in KEEPS_MATMULS:
        return named
    dots = policies.dots_with_no_batch_dims_saveable
    return policies.save_from_both_policies(dots, named)


NONE = "none"
REMAT_POLICIES = tuple(_KEPT_NAMES)
"""Values of `remat=` beside "none", which wraps nothing, and names of the model's."""

_NAMES = "names:"


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
    for term in remat.split("+"):
        policy = term.partition("*")[2]
        if policy.startswith(_NAMES):
            raise LayoutError(
                f"remat={shown(remat)}: {shown(policy)!r} keeps values by name, which "
                f"has to hold for all layers; use {', '.join([NONE, *REMAT_POLICIES])} "
                "in a mix"
            )
    known, example = [NONE, *REMAT_POLICIES], "12*full+10*none"
    return canonical_mix("remat", remat, known, "policy", example)


def keeps_matmuls(remat: str) -> bool:
    """Whether any layer keeps results of matmuls, and so much of its forward pass."""
    policies = remat.split("+") if is_mix(remat) else [remat]
    kept = {policy.rpartition("*")[2] for policy in policies}
    return not kept.isdisjoint((NONE, *KEEPS_MATMULS))


def repeated_share(remat: str, depth: int) -> float:
    """The share of the layers whose backward pass computes anything again.

    Args:
      remat: a value of `remat=`.
      depth: number of layers of the stack.
    """
    return average(remat, depth, lambda policy: float(policy != NONE))


def repeats(policy: str, name: str) -> bool:
    """Whether the backward pass of a layer computes the values of a name again.

    Args:
      policy: one policy, no mix.
      name: of the values, by `checkpoint_name`.
    """
    return policy != NONE and name not in _kept_names(policy)


def named_values(jaxpr: Any) -> frozenset[str]:
    """The names that a model gives to values; one name stands for all of attention."""
    named = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "name")
    given = {eqn.params["name"] for eqn in named}
    return frozenset(given | ({ATTENTION} if given & {*_ATTENTION_NAMES} else set()))


def lacks_values(policy: str, given: Collection[str]) -> str:
    """The name of the values that a policy is for, if a model has none; "" otherwise.

    Args:
      policy: one policy, no mix.
      given: the names that the model gives to values.
    """
    needed = _NEEDED_NAMES.get(policy, "")
    return "" if needed in given else needed


def keeps_by_name(policy: str, name: str) -> bool:
    """Whether a policy, no mix, keeps the values of one name and not those of all."""
    return policy != NONE and name in _kept_names(policy)


def check_marks(remat: str, jaxpr: Any, is_marked: bool, marks_outside: bool) -> None:
    """Checks that a model has what `remat=` of its layout needs.

    Args:
      remat: a value of `remat=`.
      jaxpr: of the model's loss.
      is_marked: whether its layers are rematerialized.
      marks_outside: whether it marks anything outside the layers of its stack.

    Raises:
      LayoutError: no layer is, a name that the model gives to no value, a policy that
        keeps values which no layer has, or a mix and a mark that belongs to no layer.
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
    policies = [policy for policy, _ in segments(remat, depth=1)]
    if not _NEEDED_NAMES.keys() & {*policies} and not _names(remat):
        return
    given = named_values(jaxpr)
    for name in _names(remat):
        if name not in given:
            known = nearest(name, given) if given else "it names none"
            raise LayoutError(
                f"remat={remat}: the model gives no value the name {name!r} "
                f"({known}); name one by jax.ad_checkpoint.checkpoint_name"
            )
    for policy in policies:
        if lacking := lacks_values(policy, given):
            raise LayoutError(
                f"remat={remat}: {policy} keeps the values that meshpar.ops names "
                f"{lacking!r}, and no layer has any under this layout; use remat=full, "
                "which would keep as much"
            )


def _names(remat: str) -> list[str]:
    """The names that a value of `remat=` lists."""
    return remat.removeprefix(_NAMES).split("+") if remat.startswith(_NAMES) else []


def _kept_names(policy: str) -> tuple[str, ...]:
    """Names of the values that a policy keeps; "attention" stands for all its forms."""
    if names := _names(policy):
        return (*names, *(_ATTENTION_NAMES if ATTENTION in names else ()))
    return _KEPT_NAMES[policy]


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
    return transform(layer, policy=_policy_of(remat), **options)
