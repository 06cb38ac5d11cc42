"""Explanations of layouts that were never compiled, for reports and pictures."""

from meshpar.contracts.shares import Shares
from meshpar.explain.report import CollectiveRow, Explanation


def explanation(layout: str, size: float) -> Explanation:
    """A layout that sends `size` bytes over each of three axes, and holds as many."""
    rows = tuple(
        CollectiveRow("all_reduce", (axis,), size, False, size, size / 4, 1, ("why",))
        for axis in ("data", "fsdp", "tensor")
    )
    return Explanation(
        layout=layout,
        lowering="shard_map",
        why_auto="",
        device_kind="cpu",
        mesh={"data": 2, "tensor": 4},
        parameters=(),
        replicated={},
        predicted=None,
        state_bytes=int(size),
        compiled_bytes={"peak": int(size)},
        traffic=rows,
        shares=Shares(3 * size),
        violations=(),
        warnings=("a warning",),
    )
