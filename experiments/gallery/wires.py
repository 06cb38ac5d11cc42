"""Bytes that a device sends, counted in a compiled program by formulas of its own."""

from collections.abc import Mapping

from meshpar.contracts.hlo import parse_hlo

_PAYLOADS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""Times that a ring sends (n - 1) / n of the payload; a permute sends all of it once.

Written out here, so that the library's own costs are compared with something else.
"""


def sent(text: str, axes: Mapping[str, int]) -> dict[str, float]:
    """{kind of collective: bytes that one device sends per call}.

    Args:
      text: of a compiled program.
      axes: {mesh axis: size}.
    """
    found: dict[str, float] = {}
    for one in parse_hlo(text, dict(axes)):
        n = one.group_size
        share = _PAYLOADS[one.kind] * (n - 1) / n if one.kind in _PAYLOADS else 1.0
        size = share * one.payload_bytes * one.executions
        found[one.kind] = found.get(one.kind, 0.0) + size
    return found


def counts(text: str, axes: Mapping[str, int]) -> dict[str, int]:
    """{kind of collective: times that it runs per call}."""
    found: dict[str, int] = {}
    for one in parse_hlo(text, dict(axes)):
        found[one.kind] = found.get(one.kind, 0) + one.executions
    return found
