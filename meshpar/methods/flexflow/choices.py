"""Choices for a model that is no stack of layers: which axis splits which dim.

A parameter without dim names is a choice of its own: the layout names its dims by a
path rule, with the names of axes. Parameters with dim names share one choice for each
name, which becomes a rule for parameters, and one for activations where the model
constrains such a dim.

Source: Jia et al., arXiv:1807.05358, section 4 (the SOAP space); here the part of it
  that layouts can say.
"""

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from meshpar.layouts.axes import BATCH_AXES, DATA, EXPERT, FSDP, TENSOR
from meshpar.layouts.layout import Layout
from meshpar.layouts.param import Param
from meshpar.layouts.rules import ACTIVATION_RULES, PARAM_RULES

SPLITTING = (FSDP, EXPERT, TENSOR)
"""Axes that may split the dims of a parameter without names.

`expert` splits the batch as `data` does, and holds its part of a weight as `tensor`
does: convolutions run data-parallel over it, and large dense layers model-parallel.
"""

SEARCHED = (DATA, *SPLITTING)
"""Axes whose sizes are searched."""

_NAMED = (FSDP, TENSOR)
"""Axes that may split a dim with a name."""

_NUMBER = re.compile(r"\d+")

State = tuple[int, ...]
"""The option that is taken of each choice."""

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Choice:
    """One thing to choose.

    Attributes:
      path: of a parameter without dim names; "" for a name of dims.
      name: of dims; "" for a parameter.
      options: for a parameter, a name or None for each dim; for a name of dims, the
        axes that split it in parameters, and in activations. The first splits nothing.
      kind: of choices that are changed together: those of layers that are alike.
    """

    path: str
    name: str
    options: tuple[tuple, ...]
    kind: str


class Choices:
    """All choices of one model on a mesh of some sizes."""

    def __init__(
        self,
        params: Mapping[str, Param],
        constrained: Collection[str],
        sizes: Mapping[str, int],
        required: Mapping[str, Any],
    ):
        """Lists the choices.

        Args:
          params: {path: Param} of the model.
          constrained: names of dims that the model constrains in activations.
          sizes: {axis: size} of `SEARCHED`.
          required: fields of layouts that are given; their rules are no choices.
        """
        self.params, self.sizes, self.required = params, dict(sizes), dict(required)
        self.constrained = frozenset(constrained)
        self._own = {
            name for p in params.values() for name in p.names or () if _is_one(name)
        }
        self.all = (*self._of_paths(), *self._of_names())

    def given(self, kind: str) -> tuple[tuple[str, Any], ...]:
        """Rules of one kind that are required."""
        rules = self.required.get(kind, ())
        return tuple(rules.items() if isinstance(rules, Mapping) else rules)

    def _of_paths(self) -> Iterator[Choice]:
        axes = [axis for axis in SPLITTING if self.sizes[axis] > 1]
        given = [regex for regex, _ in self.given("paths")]
        for path, param in self.params.items():
            if param.names is not None or not param.shape or param.is_state or not axes:
                continue
            if not any(re.search(regex, path) for regex in given):
                options = tuple(self._path_options(param, axes))
                yield Choice(path, "", options, _path_kind(path, param))

    def _path_options(self, param: Param, axes: list[str]) -> Iterator[tuple]:
        """Names for the dims of one parameter: each axis splits one dim, or none."""
        places = (None, *range(len(param.shape)))
        for dims in itertools.product(places, repeat=len(axes)):
            names: list[str | None] = [None] * len(param.shape)
            for axis, dim in zip(axes, dims, strict=True):
                if dim is not None and names[dim] is None:
                    names[dim] = axis
            taken = [axis for axis in names if axis]
            fits = zip(param.shape, names, strict=True)
            if len(taken) == len(dims) - dims.count(None) and all(
                size % self.sizes[axis] == 0 for size, axis in fits if axis
            ):
                yield tuple(names)

    def _of_names(self) -> Iterator[Choice]:
        fixed = {n for kind in ("params", "activations") for n, _ in self.given(kind)}
        for name in sorted((self._own | self.constrained) - fixed):
            every = (*PARAM_RULES.get(name, ()), *ACTIVATION_RULES.get(name, ()))
            rows = set(ACTIVATION_RULES.get(name, ())) & set(BATCH_AXES)
            used = [axis for axis in every if self.sizes.get(axis, 1) > 1]
            if not rows and set(used) <= set(_NAMED):
                yield Choice("", name, tuple(self._name_options(name)), name)

    def _name_options(self, name: str) -> Iterator[tuple[Axes, Axes]]:
        """(axes in parameters, axes in activations) of one name."""
        axes = [axis for axis in _NAMED if self.sizes[axis] > 1]
        in_params = [(axis,) for axis in axes] if name in self._own else []
        constrained = name in self.constrained and TENSOR in axes
        in_activations = [(TENSOR,)] if constrained else []
        yield from itertools.product([(), *in_params], [(), *in_activations])

    @property
    def data_parallel(self) -> State:
        """The state that splits no parameter and no activation but by rows."""
        return (0,) * len(self.all)

    @property
    def by_default_rules(self) -> State:
        """The state of the layout's default rules for names of dims."""
        wanted = ((c.options, () if c.path else self.default(c.name)) for c in self.all)
        return tuple(opts.index(w) if w in opts else 0 for opts, w in wanted)

    def default(self, name: str) -> tuple[Axes, Axes]:
        """Axes in use of the default rules of a name: in parameters, activations."""
        first, second = (
            tuple(axis for axis in rules.get(name, ()) if self.sizes.get(axis, 1) > 1)
            for rules in (PARAM_RULES, ACTIVATION_RULES)
        )
        return first, second

    def names_of(self, state: State) -> dict[str, tuple]:
        """{path: names of its dims} of the parameters that the model left unnamed."""
        return {
            choice.path: choice.options[index]
            for choice, index in zip(self.all, state, strict=True)
            if choice.path
        }

    def rules_of(self, state: State) -> tuple[dict[str, Axes], dict[str, Axes]]:
        """{name: axes} of names that are chosen, in parameters and in activations."""
        taken = {
            choice.name: choice.options[index]
            for choice, index in zip(self.all, state, strict=True)
            if choice.name
        }
        return (
            {name: axes for name, (axes, _) in taken.items()},
            {name: axes for name, (_, axes) in taken.items()},
        )

    def layout(self, state: State) -> Layout:
        """The layout of a state.

        Raises:
          LayoutError: what is required does not go with it.
        """
        params, activations = self.rules_of(state)
        params = {
            name: axes
            for name, axes in params.items()
            if name in self._own
            and (axes != self.default(name)[0] or name not in PARAM_RULES)
        }
        activations = {
            name: axes
            for name, axes in activations.items()
            if name in self.constrained and axes != self.default(name)[1]
        }
        paths = path_rules(self.names_of(state), self.params)
        fields = {**self.sizes, **self.required}
        fields["params"] = params | dict(self.given("params"))
        fields["activations"] = activations | dict(self.given("activations"))
        fields["paths"] = (*self.given("paths"), *paths)
        return Layout(**fields)


def _is_one(name: Any) -> bool:
    """Whether a dim has one name; several, or none, are no choice."""
    return isinstance(name, str)


def _path_kind(path: str, param: Param) -> str:
    """A key, equal for parameters that are laid out alike in most layers.

    These are parameters of one shape whose paths differ by numbers alone, and all
    vectors of one size, such as biases and scales.
    """
    name = _NUMBER.sub("N", path) if len(param.shape) > 1 else "vector"
    return f"{name} {param.shape}"


def path_rules(
    names: Mapping[str, tuple], params: Mapping[str, Param]
) -> Iterator[tuple[str, tuple]]:
    """(regex, dim names) pairs, one for all parameters with the same names.

    Paths that differ by numbers alone share a regex, unless it matched others.

    Args:
      names: {path: dim names} of parameters that the model left unnamed.
      params: {path: Param} of the model.
    """
    unnamed = [path for path, param in params.items() if param.names is None]
    groups: dict[tuple, list[str]] = {}
    for path, dims in names.items():
        groups.setdefault(dims, []).append(path)
    for dims, paths in groups.items():
        alternatives: dict[str, None] = {}
        for path in paths:
            pattern = r"\d+".join(map(re.escape, _NUMBER.split(path)))
            alike = [other for other in unnamed if re.fullmatch(pattern, other)]
            shared = all(names.get(other) == dims for other in alike)
            alternatives[pattern if shared else re.escape(path)] = None
        one, *more = alternatives
        yield f"^({'|'.join(alternatives)})$" if more else f"^{one}$", dims
