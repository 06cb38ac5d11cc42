"""How the values of an optimizer's update lie on the devices.

Arguments lie as the plan says. From there it follows for elementwise operations, sums,
transposes and dims of size 1, which devices compute on their own shards.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from meshpar.jaxprs.reach import ELEMENTWISE, REDUCTIONS
from meshpar.layouts.plan import Spec
from meshpar.lowering.layer_update import Operation


class Tensor(NamedTuple):
    """How one value of an update lies on the devices.

    Attributes:
      shape: of one row.
      dtype: its dtype.
      rows: mesh axes that split its stack of layers; () if it is in none.
      spec: mesh axes for each dim of a row; None if nothing says so.
      trained: whether it depends on parameters or gradients.
    """

    shape: tuple[int, ...]
    dtype: Any
    rows: tuple[str, ...] = ()
    spec: Spec | None = None
    trained: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of one whole row."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_large(self) -> bool:
        """Whether it is more than one number per tensor that is trained."""
        return self.trained and math.prod(self.shape) > 1


def results_placed(operation: Operation, operands: Sequence[Tensor]) -> list[Tensor]:
    """How the results of an operation outside of regions lie."""
    trained = any(x.trained for x in operands)
    read = zip(operation.operands, operands, strict=True)
    rows = next((x.rows for value, x in read if value.layer is not None), ())
    if operation.eqn is None:  # A choice: as the first of its options.
        return [operands[1]._replace(trained=trained)]
    return [
        Tensor(
            x.aval.shape, x.aval.dtype, rows, _spec(operation.eqn, operands, x.aval)
        )._replace(trained=trained)
        for x in operation.eqn.outvars
    ]


def _spec(eqn: Any, operands: Sequence[Tensor], out: Any) -> Spec | None:
    """How a result lies where no matrix is made whole; None if that is not known."""
    name, shape = eqn.primitive.name, out.shape
    known = [x for x in operands if x.spec is not None and math.prod(x.shape) > 1]
    if not any(x.is_large for x in operands):
        return ((),) * len(shape)
    if name in ELEMENTWISE:
        return next((x.spec for x in known if x.shape == shape), None)
    x = operands[0]
    if x.spec is None:
        return None
    if name in REDUCTIONS:
        axes = eqn.params["axes"]
        return tuple(a for dim, a in enumerate(x.spec) if dim not in axes)
    if name == "transpose":
        return tuple(x.spec[dim] for dim in eqn.params["permutation"])
    if name in ("broadcast_in_dim", "reshape", "squeeze"):
        return _reshaped(eqn, x, shape)
    return None


def _reshaped(eqn: Any, x: Tensor, shape: tuple[int, ...]) -> Spec | None:
    """The spec after dims of size 1 come or go, or values are repeated along dims."""
    if eqn.primitive.name == "broadcast_in_dim":
        spec: list[tuple[str, ...]] = [()] * len(shape)
        for dim, new in enumerate(eqn.params["broadcast_dimensions"]):
            if x.shape[dim] == shape[new]:
                spec[new] = x.spec[dim]
        return tuple(spec)
    kept = [(n, axes) for n, axes in zip(x.shape, x.spec, strict=True) if n > 1]
    if [n for n, _ in kept] != [n for n in shape if n > 1]:
        return None
    axes = iter(kept)
    return tuple(next(axes)[1] if n > 1 else () for n in shape)
