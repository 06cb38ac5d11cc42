"""Calls of Linen modules, replaced, and the lifts (`nn.scan`, ...) around them."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn

OnModule = Callable[[int, nn.Module, Callable[[], Any], tuple, dict[str, Any]], Any]
"""(number of the call, module, the call itself, args, kwargs) -> its output."""

NumberAt = Callable[[str], int | None]
"""Path of a module -> number of its call; None if that is not replaced."""


@dataclasses.dataclass(frozen=True)
class Lift:
    """How a lifted class was made: `transform(module_class, **settings)`.

    Attributes:
      transform: Flax's function for scopes.
      module_class: the class that was lifted.
      settings: all other arguments.
    """

    transform: Callable
    module_class: type[nn.Module]
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, module_class: type[nn.Module]) -> "Lift | None":
        """The lift that made a class; None if it is a class of its own.

        Flax has no public way to ask; the function that it makes holds the values.
        """
        call = vars(module_class).get("__call__")
        while call is not None:
            code = getattr(call, "__code__", None)
            names = code.co_freevars if code else ()
            cells = dict(
                zip(names, getattr(call, "__closure__", None) or (), strict=True)
            )
            if _SETTINGS in cells:
                return cls(*(cells[name].cell_contents for name in _VALUES))
            call = getattr(call, "__wrapped__", None)
        return None

    @classmethod
    def running(cls) -> "list[tuple[Lift, type[nn.Module]]]":
        """(lift, lifted class) of those in which a call runs, innermost first.

        Interceptors see the call of the module inside a lifted one alone, so that the
        lifts around it are read from the functions that are running.
        """
        lifts, frame = [], inspect.currentframe()
        while frame is not None:
            if _SETTINGS in frame.f_code.co_freevars:
                values = frame.f_locals
                found = cls(*(values[name] for name in _VALUES))
                lifts.append((found, type(values["self"])))
            frame = frame.f_back
        return lifts


_SETTINGS = "trafo_kwargs"
_VALUES = ("transform", "module_class", _SETTINGS)
"""Variables of the function by which a lifted class calls its module."""


@contextlib.contextmanager
def calls_replaced(number_at: NumberAt, on_module: OnModule) -> Iterator[None]:
    """Replaces calls of modules, but none that are made inside them.

    Args:
      number_at: says which modules are meant.
      on_module: takes the place of their calls.
    """
    inside = False

    def interceptor(next_fun: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        nonlocal inside
        module, run = context.module, functools.partial(next_fun, *args, **kwargs)
        is_call = context.method_name == "__call__" and not inside
        number = number_at("/".join(module.path)) if is_call else None
        if number is None:
            return run()
        inside = True
        try:
            return on_module(number, module, run, args, kwargs)
        finally:
            inside = False

    with nn.intercept_methods(interceptor):
        yield
