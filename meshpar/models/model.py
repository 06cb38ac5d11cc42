"""The contract of a model, the same for Flax NNX and Flax Linen.

Every lowering and strategy sees a `Model`: named parameter shapes, a pure `init` and a
pure `loss`. Parameters are a flat dict {path: array} with the same paths on every mesh,
so that checkpoints and reports do not depend on the layout.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from meshpar.arrays import Array, Params
from meshpar.errors import MeshparError
from meshpar.layouts.param import Param
from meshpar.layouts.refusals.combination import ModelTraits
from meshpar.metrics import LossResult
from meshpar.models.cached import CachedModel
from meshpar.models.layer_stack import LayeredModel

STEP = "training_step"
"""Path of the number of steps done, for models whose loss asks for it."""

Variables = dict[str, Array]
"""{path in the module: array} of all variables, random streams aside."""


@dataclasses.dataclass(frozen=True)
class PlainModel:
    """A module as its user wrote it, and its loss functions (`models.plain`).

    Attributes:
      init: random key -> variables.
      loss: (variables, batch, key) -> (what the loss function returns, the variables
        after it ran); without a key in evaluation mode.
    """

    init: Callable[[Array], Variables]
    loss: Callable[[Variables, Any, Array | None], tuple[Any, Variables]]


@dataclasses.dataclass(frozen=True, repr=False)
class Model:
    """A Flax model as pure functions over {path: array}.

    Attributes:
      params: {path: Param}, in the order of the model.
      init: key -> parameters.
      loss: (params, batch, key) -> (loss, aux), made by `loss_result`.
      evaluation_loss: (params, batch) -> (loss, aux) in evaluation mode, without
        dropout.
      bind: params -> the callable model (an NNX module, or Linen's `apply`).
      layered: the model layer by layer, which the shard_map lowering needs; None if the
        model has no such form.
      keys: {path: keys of the parameter in the model's nested dicts}, which optimizers
        see; paths are split at "/" where it has none.
      rows: {path of a stack: the module's path of each row}, of layers that meshpar
        stacks; None for a row of padding.
      stack_variables: {path of the module: array} -> {path: array}, the layers stacked.
      plain: the module as its user wrote it, with which programs are compared; None
        where they are compared with one device alone.
      given: {path in the module: array} that training starts from, of a module that was
        given as an instance; None starts from `init`.
      cached: the model with a cache, for generation; None if it gives none.
      asks_for_key: whether the evaluation loss has an argument `key`, which is None.
      evaluates_apart: whether evaluation has a loss function or a module of its own.
    """

    params: Mapping[str, Param]
    init: Callable[[Array], Params]
    loss: Callable[[Params, Any, Array], LossResult]
    evaluation_loss: Callable[[Params, Any], LossResult]
    bind: Callable[[Params], Any]
    layered: LayeredModel | None = None
    keys: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    rows: Mapping[str, tuple[str | None, ...]] = dataclasses.field(default_factory=dict)
    stack_variables: Callable[[Params], Params] = lambda params: params
    plain: PlainModel | None = None
    given: Mapping[str, Any] | None = None
    cached: CachedModel | None = None
    asks_for_key: bool = False
    evaluates_apart: bool = False

    def __repr__(self) -> str:
        count = sum(math.prod(param.shape) for param in self.params.values())
        text = f"{count:,} values in {len(self.params)} arrays"
        depth = f"{self.layered.depth} layers, " if self.layered else ""
        return f"Model({depth}{text})"

    @property
    def traits(self) -> ModelTraits:
        """Facts of the model at which the table of refusals looks."""
        state = (path for path, param in self.params.items() if param.is_state)
        changed = sorted(path for path in state if path != STEP)
        cached = self.cached
        cache = dict(caches=cached is not None, streams=bool(cached and cached.streams))
        if (layered := self.layered) is None:
            return ModelTraits(changed="".join(changed[:1]), **cache)
        depth, pattern, evaluates = layered.depth, layered.pattern, layered.evaluates
        return ModelTraits(depth, pattern, evaluates, "".join(changed[:1]), **cache)

    def keys_of(self, path: str) -> tuple[Any, ...]:
        """Keys of a parameter in the model's nested dicts."""
        return self.keys.get(path) or tuple(path.split("/"))


def checked_params(params: dict[str, Param]) -> dict[str, Param]:
    """Parameters whose names are padded with None to all dims, as a PartitionSpec is.

    Raises:
      MeshparError: no parameters, none that is trained, or one with more names than
        dims.
    """
    kinds = {path: param.kind for path, param in params.items()}
    if not set(kinds.values()) - {"state"}:
        raise MeshparError("the model has no parameters")
    if "parameter" not in kinds.values():
        frozen = ", ".join(path for path, kind in kinds.items() if kind == "frozen")
        raise MeshparError(
            f"no parameter of the model is trained: trained= selects none of {frozen} "
            "that is floating point"
        )
    for path, param in params.items():
        if param.names is None:
            continue
        missing = len(param.shape) - len(param.names)
        if missing < 0:
            raise MeshparError(
                f"parameter {path} has shape {param.shape} and dim names {param.names}"
                ": more names than dims"
            )
        names = param.names + (None,) * missing
        params[path] = dataclasses.replace(param, names=names)
    return params
