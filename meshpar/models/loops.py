"""Loops of models whose state starts from constants, inside shard_map.

A recurrent layer starts from zeros, which are the same on all devices, and its state
then depends on the batch, which is not. `jax.lax.scan` wants one type for both. While
a model is traced under a layout, a loop that jax refuses for this reason runs again
with a start that is marked as varying. No other loop is touched.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from meshpar.arrays import vary
from meshpar.layouts.scope import current_scope

_REASON = ("pcast", "pvary", "varying")
"""Words by which jax says that only the axes over which a value varies differ."""


def _varying(tree: Any) -> Any:
    """A tree whose arrays vary over all manual axes of the shard_map around."""
    axes = tuple(sorted(jax.sharding.get_abstract_mesh().manual_axes))
    return jax.tree.map(lambda x: vary(jax.numpy.asarray(x), axes), tree)


def _in_shards() -> bool:
    return current_scope() is not None and bool(
        jax.sharding.get_abstract_mesh().manual_axes
    )


def _once_more(loop: Callable, varying_loop: Callable) -> Callable:
    """The loop; `varying_loop` where jax refuses its start."""

    @functools.wraps(loop)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _in_shards():
            return loop(*args, **kwargs)
        try:
            return loop(*args, **kwargs)
        except TypeError as error:
            if not any(word in str(error) for word in _REASON):
                raise
        return varying_loop(*args, **kwargs)

    run.meshpar_loop = True
    return run


def _scan(scan: Callable) -> Callable:
    def varying_scan(f: Callable, init: Any, *args: Any, **kwargs: Any) -> Any:
        def body(carry: Any, x: Any) -> tuple[Any, Any]:
            carry, y = f(carry, x)
            return _varying(carry), y

        return scan(body, _varying(init), *args, **kwargs)

    return varying_scan


def _while_loop(while_loop: Callable) -> Callable:
    def varying_loop(cond_fun: Callable, body_fun: Callable, init_val: Any) -> Any:
        def body(carry: Any) -> Any:
            return _varying(body_fun(carry))

        return while_loop(cond_fun, body, _varying(init_val))

    return varying_loop


def _fori_loop(fori_loop: Callable) -> Callable:
    def varying_loop(
        lower: Any, upper: Any, body_fun: Callable, init_val: Any, **kwargs: Any
    ) -> Any:
        def body(i: Any, carry: Any) -> Any:
            return _varying(body_fun(i, carry))

        return fori_loop(lower, upper, body, _varying(init_val), **kwargs)

    return varying_loop


def install() -> None:
    """Makes the loops of `jax.lax` start again where models run in shards."""
    for name, make in (
        ("scan", _scan),
        ("while_loop", _while_loop),
        ("fori_loop", _fori_loop),
    ):
        loop = getattr(lax, name)
        if not hasattr(loop, "meshpar_loop"):
            setattr(lax, name, _once_more(loop, make(loop)))
