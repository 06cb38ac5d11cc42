"""Path rules of a layout that give many parameters names in few regexes."""

import re
from collections.abc import Iterator, Mapping

from meshpar.layouts.param import Param

_NUMBER = re.compile(r"\d+")


def path_kind(path: str, param: Param) -> str:
    """The same for parameters that are laid out alike in most layers.

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
