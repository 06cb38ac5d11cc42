"""Recipes of your own: a function that returns a `Run`, as FILE.py:FUNCTION.

The keyword arguments of the function are settings: `def gpt(width: int = 256)` takes
`--set=width=512`. One that has the name of a setting of every run, such as `steps` or
`batch_size`, gets the value of that one, and gives it another default.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import pathlib
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Self

from meshpar.errors import ConfigError, MeshparError, RecipeError, nearest, shown
from meshpar.runs.config import RunConfig, settings_of
from meshpar.runs.run import Run
from meshpar.settings import entries, range_of


@dataclasses.dataclass(frozen=True)
class RecipeConfig(RunConfig):
    """The settings of a recipe of your own: every run's settings, and its arguments."""

    FUNCTION: ClassVar[Callable[..., Run]]
    """The function, as the recipe's file has it."""
    SOURCE: ClassVar["_Source"]
    """The module of the recipe, and what its import brought in."""

    @property
    def code(self) -> Mapping[str, str]:
        return _code(self.SOURCE)

    def prepared(self) -> tuple[Self, Run]:
        """Calls the function with the settings; returns a configuration and its run.

        Raises:
          ConfigError: the function raises, or returns something else.
          MeshparError: a model or data that are none.
        """
        function = type(self).FUNCTION
        names = inspect.signature(function).parameters
        arguments = {name: getattr(self, name) for name in names}
        with self.blaming_recipe():
            run = function(**arguments)
            if not isinstance(run, Run):
                raise ConfigError(
                    f"{self.recipe} returned a {type(run).__name__}; return a "
                    "meshpar.Run"
                )
            return self, run.checked()

    @contextlib.contextmanager
    def blaming_recipe(self) -> Iterator[None]:
        """Blames the recipe for errors that a line of the file raises."""
        file = type(self).FUNCTION.__code__.co_filename
        try:
            yield
        except MeshparError as error:
            if not (line := _line_of(error.__cause__, file)):
                raise
            raise RecipeError(f"{error} ({line})") from error.__cause__
        except _OF_USERS as error:
            if not (line := _line_of(error, file)):
                raise
            raise RecipeError(
                f"{self.recipe} raised {_told(error, line)}; mend it, or its settings"
            ) from error


class _Source(NamedTuple):
    """The module that holds a recipe.

    Attributes:
      module: the module.
      root: the folder of its file, or of its package.
      earlier: names of the modules that were imported before it.
    """

    module: types.ModuleType
    root: pathlib.Path
    earlier: frozenset[str]


_INSTALLED = {"site-packages", "dist-packages"}
"""Names of folders of modules that are not the user's own."""


@functools.cache  # The files may be edited while the run goes on.
def _code(source: _Source) -> Mapping[str, str]:
    """{file: hash} of the recipe's file, and of those below the root that it imported.

    Modules that the recipe's function imports count as well: the function has run when
    a run first asks.
    """
    own, root, earlier = source
    brought = {
        module.__file__
        for name, module in list(sys.modules.items())
        if name not in earlier
        and name.partition(".")[0] != "meshpar"
        and getattr(module, "__file__", None)
    }
    files = [pathlib.Path(file) for file in sorted(brought - {own.__file__})]
    beside = [
        file
        for file in files
        if file.is_relative_to(root)
        and not _INSTALLED.intersection((root.name, *file.relative_to(root).parts))
    ]
    return {
        file.relative_to(root).as_posix(): _hash(file)
        for file in (pathlib.Path(own.__file__), *beside)
    }


def _hash(file: pathlib.Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


_OF_USERS = (Exception, SystemExit)
"""Errors that code of a user may raise."""


def _line_of(error: BaseException | None, file: str | None = None) -> str:
    """The last line of a file that raised an error, as FILE:LINE; "" for none.

    Args:
      error: the error, if there is one.
      file: the file; any but those that import it by default.
    """
    if isinstance(error, SyntaxError) and error.lineno:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error and error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    if file is None:
        own = [frame for frame in frames if "importlib" not in frame.filename]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def _told(error: BaseException, line: str = "") -> str:
    """An error in a line, with the line of the user's file that it comes from."""
    text = " ".join(str(error).split())
    where = line or _line_of(error)
    told = f"{type(error).__name__}: {shown(text, 400)}"
    return f"{told} ({where})" if where else told


def config_of(recipe: str) -> RecipeConfig:
    """The configuration of a recipe of your own, with the defaults of its function.

    Args:
      recipe: FILE.py:FUNCTION or MODULE:FUNCTION.

    Raises:
      ConfigError: no such file or function, a file that raises, or an argument that is
        no setting.
    """
    function, source = _function_of(recipe)
    kind = _class_of(recipe, function, source)
    try:
        return kind(recipe)
    except ConfigError as error:
        raise ConfigError(f"{recipe}, its defaults: {error}") from error


def function_of(name: str) -> Callable[..., Any]:
    """The function that FILE.py:FUNCTION or MODULE:FUNCTION names.

    Raises:
      ConfigError: no such file or function, or a file that raises.
    """
    return _function_of(name)[0]


def _function_of(recipe: str) -> tuple[Callable[..., Any], _Source]:
    """The function that a name stands for, and the module that holds it."""
    place, _, name = recipe.rpartition(":")
    is_file = place.endswith(".py")
    source = _source_of_file(recipe, place) if is_file else _source(recipe, place)
    module = source.module
    functions = [k for k, x in vars(module).items() if inspect.isfunction(x)]
    function = getattr(module, name, None)
    if not inspect.isfunction(function):
        found = nearest(name, functions) if functions else "it has none; write one"
        raise ConfigError(f"--recipe={recipe}: no function {name!r} ({found})")
    return function, source


def _source(recipe: str, name: str) -> _Source:
    try:
        return _imported(name)
    except _OF_USERS as error:
        raise ConfigError(
            f"--recipe={recipe}: the module {name} cannot be imported: {_told(error)}; "
            "write FILE.py:FUNCTION, or MODULE:FUNCTION of a module on the path"
        ) from error


@functools.cache
def _imported(name: str) -> _Source:
    """The source of a module by its name; its root is that of its whole package."""
    earlier = frozenset(sys.modules)
    module = importlib.import_module(name)
    package = sys.modules[name.partition(".")[0]]
    file = getattr(package, "__file__", None) or ""  # A package without __init__.py.
    places = [*getattr(package, "__path__", ()), pathlib.Path(file).parent]
    return _Source(module, pathlib.Path(places[0]), earlier)


def _source_of_file(recipe: str, place: str) -> _Source:
    path = pathlib.Path(place)
    if not path.is_file():
        raise ConfigError(
            f"--recipe={recipe}: there is no file {shown(place)} in "
            f"{pathlib.Path.cwd()}; give its path"
        )
    return _loaded(path.absolute(), path.stat().st_mtime_ns)


@functools.cache
def _loaded(path: pathlib.Path, _: int) -> _Source:
    """The source of a file; modules beside it can be imported, as by a script."""
    earlier = frozenset(sys.modules)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"meshpar_recipe_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except _OF_USERS as error:
        del sys.modules[spec.name]
        raise ConfigError(
            f"{path} cannot be imported: {_told(error)}; mend it"
        ) from error
    return _Source(module, path.parent, earlier)


@functools.cache
def _class_of(
    recipe: str, function: Callable[..., Run], source: _Source
) -> type[RecipeConfig]:
    """The class of configurations of a recipe: a field for each argument."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(f"{recipe}, its annotations: {error}; import it") from error
    of_runs = typing.get_type_hints(RunConfig, include_extras=True)
    fields = []
    for name, parameter in inspect.signature(function).parameters.items():
        _check_argument(recipe, name, parameter)
        if name not in of_runs and hasattr(RecipeConfig, name):
            raise ConfigError(
                f"{recipe}, argument {name}: the name has a meaning of its own in "
                "every recipe; rename it"
            )
        kind = of_runs.get(name) or hints.get(name, type(parameter.default))
        has_range = typing.get_origin(kind) is typing.Annotated
        if not has_range and not dataclasses.is_dataclass(parameter.default):
            try:
                range_of(kind)
            except MeshparError as error:
                raise ConfigError(f"{recipe}, argument {name}: {error}") from error
        default = dataclasses.field(default=parameter.default)
        fields.append((name, kind, default))
    texts = entries(function.__doc__ or "", "Args")
    lines = [f"  {name}: {text}" for name, text in texts.items()]
    doc = "\n".join([f"Settings of {recipe}.", "", "Attributes:", *lines])
    own = {"FUNCTION": staticmethod(function), "SOURCE": source, "__doc__": doc}
    try:
        kind = dataclasses.make_dataclass(
            "RecipeConfig", fields, bases=(RecipeConfig,), namespace=own, frozen=True
        )
        settings_of(kind)
    except (MeshparError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{recipe}: its arguments are no settings: {error}; dataclasses must be "
            "frozen"
        ) from error
    return kind


def _check_argument(recipe: str, name: str, parameter: inspect.Parameter) -> None:
    """Raises ConfigError for an argument that cannot be a setting."""
    by_name = parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY
    if parameter.kind not in by_name:
        raise ConfigError(
            f"{recipe}, argument {name}: settings are given by name; write each of "
            "them out, with a default"
        )
    if parameter.default is parameter.empty:
        raise ConfigError(
            f"{recipe}, argument {name}: it has no default; give it one, which "
            f"--set={name}=VALUE changes"
        )
