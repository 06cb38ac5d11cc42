"""Transfers between host and device memory: declared, and read from compiled programs.

TPU programs show them as asynchronous copies and slices of arrays in memory space 5,
the host's. CPU and GPU programs do not show them all.
"""

import dataclasses
import re
from collections.abc import Collection, Iterator

from meshpar.contracts.hlo_text import (
    Instruction,
    parse_computations,
    trip_count,
    type_bytes,
)

_ON_HOST = "S(5)"
_ARRAY = re.compile(r"\b[a-z]\w*\[[\d,]*\](?:\{[^}]*\})?")
_MOVES = ("copy-start", "dynamic-slice-start", "dynamic-update-slice-start")


@dataclasses.dataclass(frozen=True)
class HostTransfer:
    """Bytes that one device exchanges with host memory per step.

    Attributes:
      why: purpose, for reports.
      to_device: bytes from the host.
      to_host: bytes to the host.
      bound: whether both are upper bounds.
    """

    why: str
    to_device: int
    to_host: int
    bound: bool = False


def link_seconds(transfers: Collection[HostTransfer], bandwidth: float) -> float:
    """Least time of transfers over the link to the host, whose directions run together.

    Args:
      transfers: of one device.
      bandwidth: bytes per second, one way.
    """
    to_device = sum(transfer.to_device for transfer in transfers)
    to_host = sum(transfer.to_host for transfer in transfers)
    return max(to_device, to_host) / bandwidth


def host_violations(
    declared: Collection[HostTransfer], found: HostTransfer | None
) -> list[str]:
    """One line per direction in which a compiled program moves other bytes.

    Args:
      declared: the transfers of one step.
      found: those of the compiled step; None if its program does not show them.
    """
    if found is None:
        return []
    why = "; ".join(transfer.why for transfer in declared) or "nothing is offloaded"
    lines = []
    for name in ("to_device", "to_host"):
        size = getattr(found, name)
        most = sum(getattr(transfer, name) for transfer in declared)
        least = sum(getattr(t, name) for t in declared if not t.bound)
        if not least <= size <= most:
            lines.append(
                f"host memory: {size} bytes {name.replace('_', ' the ')} found, {most} "
                f"declared ({why})"
            )
    return lines


def host_transfers(text: str) -> HostTransfer:
    """The transfers of a compiled TPU program, all together.

    Args:
      text: `jax.stages.Compiled.as_text()`.

    Raises:
      ValueError: the text is not that of a compiled program, or does not tell how often
        a loop with transfers runs.
    """
    computations, entry = parse_computations(text)

    def moves(computation: str) -> Iterator[tuple[int, int]]:
        """(bytes to the device, bytes to the host) of every transfer."""
        for instruction in computations.get(computation, {}).values():
            if instruction.opcode == "while":
                body = re.search(r"body=%?([\w.\-]+)", instruction.line).group(1)
                if once := list(moves(body)):
                    times = trip_count(instruction, computations)
                    yield from ((times * down, times * up) for down, up in once)
            elif any(moved := host_bytes(instruction)):
                yield moved
            elif not instruction.opcode.endswith("-done"):
                for callee in instruction.callees:
                    yield from moves(callee)

    sizes = list(moves(entry))
    to_device, to_host = sum(down for down, _ in sizes), sum(up for _, up in sizes)
    return HostTransfer("as compiled", to_device, to_host)


def host_bytes(instruction: Instruction) -> tuple[int, int]:
    """(bytes to the device, bytes to the host) that an instruction begins to move."""
    if instruction.opcode not in _MOVES or _ON_HOST not in instruction.type:
        return 0, 0
    arrays = _ARRAY.findall(instruction.type)
    if instruction.opcode == "dynamic-slice-start":
        # ((whole, indices...), slice, context)
        *_, moved, _ = arrays
        return (type_bytes(moved), 0) if _ON_HOST not in moved else (0, 0)
    if instruction.opcode == "dynamic-update-slice-start":
        # ((whole, update, indices...), whole, context)
        moved = arrays[1]
        return (0, type_bytes(moved)) if _ON_HOST not in moved else (0, 0)
    target, source, *_ = arrays  # (target, source, context)
    if (_ON_HOST in target) == (_ON_HOST in source):
        return 0, 0
    size = type_bytes(target)
    return (0, size) if _ON_HOST in target else (size, 0)
