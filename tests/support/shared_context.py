"""Contexts of MLIR that the lowerings of a thread share.

`jax` makes one for each lowering, which takes longer than to lower a small function.
"""

import threading
from typing import Any

from jax._src.interpreters import mlir

MOST = 200
"""Lowerings that one context serves; it keeps all that they write into it."""

_make = mlir.make_ir_context
_own = threading.local()


def context() -> Any:
    """A context in place of that of `make_ir_context`."""
    if not getattr(_own, "left", 0):
        _own.context, _own.left = _make(), MOST
    _own.left -= 1
    return _own.context
