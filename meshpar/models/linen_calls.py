"""Calls of Linen modules, replaced; those of lifted modules (`nn.scan`) as a whole."""

import contextlib
import dataclasses
import functools
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
            if "trafo_kwargs" in cells:
                values = ("transform", "module_class", "trafo_kwargs")
                return cls(*(cells[name].cell_contents for name in values))
            call = getattr(call, "__wrapped__", None)
        return None


@contextlib.contextmanager
def calls_replaced(number_at: NumberAt, on_module: OnModule) -> Iterator[None]:
    """Replaces calls of modules, but none that are made inside them.

    Args:
      number_at: says which modules are meant.
      on_module: takes the place of their calls.
    """
    inside = False

    def replaced(module: nn.Module, run: Callable, args: tuple, kwargs: dict) -> Any:
        nonlocal inside
        number = None if inside else number_at("/".join(module.path))
        run = functools.partial(run, *args, **kwargs)
        if number is None:
            return run()
        inside = True
        try:
            return on_module(number, module, run, args, kwargs)
        finally:
            inside = False

    def interceptor(next_fun: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        if context.method_name != "__call__":
            return next_fun(*args, **kwargs)
        return replaced(context.module, next_fun, args, kwargs)

    with nn.intercept_methods(interceptor), _lifted_calls_replaced(replaced):
        yield


@contextlib.contextmanager
def _lifted_calls_replaced(
    replaced: Callable[[nn.Module, Callable, tuple, dict], Any],
) -> Iterator[None]:
    """Replaces calls of lifted modules, of which interceptors see the inside alone.

    Lifted classes are often made while a model runs, so that new ones count, too.
    """
    calls: dict[type[nn.Module], Callable] = {}
    is_active = True

    def replace(cls: type[nn.Module]) -> None:
        if Lift.of(cls) is None:
            return
        calls[cls] = call = vars(cls)["__call__"]

        @functools.wraps(call)
        def outer(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            run = functools.partial(call, module)
            if not is_active:  # A class that was lifted again keeps this function.
                return run(*args, **kwargs)
            return replaced(module, run, args, kwargs)

        cls.__call__ = outer

    def init_subclass(cls: type[nn.Module], **options: Any) -> None:
        original.__func__(cls, **options)
        replace(cls)

    original = vars(nn.Module)["__init_subclass__"]
    for cls in list(_subclasses(nn.Module)):
        replace(cls)
    nn.Module.__init_subclass__ = classmethod(init_subclass)
    try:
        yield
    finally:
        is_active = False
        nn.Module.__init_subclass__ = original
        for cls, call in calls.items():
            cls.__call__ = call


def _subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
