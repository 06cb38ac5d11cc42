"""`Run`: the model, loss, optimizer and data of a training run."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from flax import nnx

from meshpar.arrays import Params
from meshpar.errors import ConfigError, shown
from meshpar.lowering.train_program import TrainProgram
from meshpar.models.model import Model
from meshpar.models.nnx import from_nnx
from meshpar.runs.data import Data
from meshpar.runs.data_forms import as_data, check_takes
from meshpar.settings import LARGEST, Number, real


def _is_function(x: Any) -> bool:
    return x is None or callable(x)


def _is_units(x: Any) -> bool:
    if not isinstance(x, tuple) or list(map(type, x)) != [str, int]:
        return False
    return x[1] > 0


def _is_baseline(x: Any) -> bool:
    if x is None:
        return True
    named = isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], str)
    return named and callable(x[1])


OF_CHECKPOINTS = frozenset(
    {"data", "seed", "position", "data_state", "layout", "config", "code", "program"}
)
"""Names of what a checkpoint of a run holds beside the identity that a user gives."""


def _is_identity(x: Any) -> bool:
    if not isinstance(x, Mapping) or OF_CHECKPOINTS.intersection(x):
        return False
    return all(isinstance(k, str) and isinstance(v, str | int) for k, v in x.items())


_FUNCTION = _is_function, "give a function, or None"
_LENGTH, _FLOPS = Number(0, 2**24, "tokens"), real(0, LARGEST, "FLOPs")
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("loss", "evaluation_loss", "padded", "sample"), _FUNCTION),
    **dict.fromkeys(("after_step", "after_evaluation", "after_checkpoint"), _FUNCTION),
    "learning_rate": (_is_function, "give a function of the step, or None"),
    "layers": (lambda x: isinstance(x, str), "give the name of the layers, or ''"),
    "units": (_is_units, 'give a name and a number, such as ("tokens", 1024)'),
    "length": (_LENGTH.allows, f"use {_LENGTH.in_words}"),
    "flops": (_FLOPS.allows, f"use {_FLOPS.in_words}"),
    "baseline": (_is_baseline, 'give a name and a function, ("name", () -> loss)'),
    "identity": (
        _is_identity,
        "give {name: text or whole number}, without the names "
        f"{', '.join(sorted(OF_CHECKPOINTS))}",
    ),
}
"""{field of a run: (value -> whether it can be meant, the remedy)}."""


@dataclasses.dataclass(frozen=True)
class Run:
    """The model, loss, optimizer and data of a training run.

    How long, under which layout and where to is not part of it: those are settings of
    `meshpar.train` and of the commands.

    Attributes:
      model: from `from_nnx` or `from_linen`; or a function of `nnx.Rngs` that builds an
        NNX module, or a module to start from, with `loss`.
      optimizer: an optax transformation.
      data: samples as {name: array [samples, ...]} or a sequence, which are shuffled
        anew in every epoch; a grain.MapDataset of samples, taken in its order; a
        grain.IterDataset of samples; or a function (part, number of parts, position) ->
        iterator of batches.
      loss: (module, batch) -> loss or (loss, metrics), as in `from_nnx`; None if
        `model` has it.
      evaluation: data of the same forms to evaluate on; None for no evaluation.
      evaluation_loss: (module, batch) -> loss in evaluation mode; `loss` by default.
      layers: where the module keeps its layers, as in `from_nnx`.
      axis_names: {mesh axis: its name in the model}, as in `lower`.
      trained: the parameters that are trained, as in `from_nnx`; all by default.
      clip_norm: largest global norm of the gradient; None for no limit.
      learning_rate: step -> learning rate, for the log alone.
      units: what a sample is counted in, and how many of them it is, for the log.
      length: tokens of a sequence, for models that generate; 0 for others.
      flops: forward and backward FLOPs of a sample, for the log; 0 if not known.
      baseline: a loss to beat and its name, for the log; None for none.
      depends_on_microbatches: whether the loss depends on the number of microbatches,
        as one that balances experts does.
      padded: a batch -> the batch with weights of its tokens, as `verify --padded`
        needs it; None where nothing can be padded.
      sample: (program, parameters) -> a text to print at the end; None for none.
      after_step: (step, {metric: value}) -> None, called with the metrics of a step in
        every process, possibly while the next step runs.
      after_evaluation: (step, {metric: value}, program, state) -> None, called in every
        process.
      after_checkpoint: (step, its folder) -> None, called in process 0 as soon as a
        checkpoint in the run's folder is complete.
      identity: {name: value} that may not change when a run resumes, beside the data
        and the seed.
    """

    model: Model | nnx.Module | Callable[[nnx.Rngs], nnx.Module]
    optimizer: optax.GradientTransformation | optax.MultiSteps
    data: Any
    loss: Callable[[Any, Any], Any] | None = None
    evaluation: Any = None
    evaluation_loss: Callable[[Any, Any], Any] | None = None
    layers: str = ""
    axis_names: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trained: Any = ""
    clip_norm: float | None = None
    learning_rate: Callable[[Any], Any] | None = None
    units: tuple[str, int] = ("samples", 1)
    length: int = 0
    flops: float = 0.0
    baseline: tuple[str, Callable[[], float]] | None = None
    depends_on_microbatches: bool = False
    padded: Callable[[Any], Any] | None = None
    sample: Callable[[TrainProgram, Params], str] | None = None
    after_step: Callable[[int, dict[str, Any]], None] | None = None
    after_evaluation: (
        Callable[[int, dict[str, Any], TrainProgram, Any], None] | None
    ) = None
    after_checkpoint: Callable[[int, pathlib.Path], None] | None = None
    identity: Mapping[str, str | int] = dataclasses.field(default_factory=dict)

    def checked(self) -> "Run":
        """The run with a `Model` and `Data` in place of what they are made from.

        Raises:
          MeshparError: a model or data that are none.
        """
        self._check_fields()
        evaluation = self.evaluation
        if evaluation is not None:
            evaluation = as_data(evaluation, "evaluation")
        return dataclasses.replace(
            self,
            model=self._model(),
            data=as_data(self.data),
            loss=None,
            evaluation=evaluation,
            evaluation_loss=None,
            layers="",
            trained="",
        )

    def _check_fields(self) -> None:
        """Raises ConfigError for a field that cannot be what it is for."""
        for name, (is_good, remedy) in _FIELDS.items():
            if not is_good(value := getattr(self, name)):
                raise ConfigError(f"Run({name}={shown(repr(value))}): {remedy}")
        if self.learning_rate is not None:
            self._check_learning_rate()

    def _check_learning_rate(self) -> None:
        try:
            shape = jax.eval_shape(lambda: self.learning_rate(np.arange(2))).shape
        except (AttributeError, TypeError, ValueError) as error:
            shape = f"an error ({' '.join(str(error).split())})"
        if shape != (2,):
            raise ConfigError(
                f"Run(learning_rate={shown(repr(self.learning_rate))}) gives "
                f"{shown(str(shape), 300)} for two steps at once; give a function of "
                "steps, such as an optax schedule"
            )

    def _model(self) -> Model:
        if isinstance(self.model, Model):
            own = {
                name: getattr(self, name)
                for name in ("loss", "evaluation_loss", "layers", "trained")
            }
            if given := [name for name, value in own.items() if value]:
                raise ConfigError(
                    f"Run({given[0]}=...) beside a Model, which has its own; give it "
                    "to from_nnx or from_linen"
                )
            return self.model
        if self.loss is None:
            raise ConfigError(
                f"Run(model={shown(type(self.model).__name__)}) without loss; add "
                "loss=(module, batch) -> loss, or give a model from from_nnx or "
                "from_linen"
            )
        linen = isinstance(self.model, nn.Module)
        built = isinstance(self.model, nnx.Module)
        if linen or not (built or callable(self.model)):
            raise ConfigError(
                f"Run(model={shown(repr(self.model))}): give a model from from_nnx or "
                "from_linen, an NNX module, or a function of nnx.Rngs that builds one"
            )
        if not built:
            check_takes(self.model, 1, "model", "nnx.Rngs")
        check_takes(self.loss, 2, "loss", "(module, batch)", more=("key", "step"))
        return from_nnx(
            self.model,
            self.loss,
            self.evaluation_loss,
            layers=self.layers,
            trained=self.trained,
        )

    @property
    def evaluates(self) -> bool:
        """Whether there are data to evaluate on."""
        return isinstance(self.evaluation, Data)
