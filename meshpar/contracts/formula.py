"""Compares collectives that a step writes with the formula of its layout.

Planners know the traffic of a layout by formula alone. Where both say the same, a
formula is right, and a step lacks no reduction.
"""

from collections.abc import Iterable

from meshpar.contracts.declared import DeclaredCollective
from meshpar.contracts.written import WrittenCollective

_Key = tuple[str, tuple[str, ...], bool]


def formula_violations(
    written: Iterable[DeclaredCollective], formula: Iterable[DeclaredCollective]
) -> list[str]:
    """Compares collectives by kind and axes: their bytes and executions.

    A step may write fewer gathers: a backward pass need not read all weights.

    Args:
      written: what the step writes of the kinds that the formula knows.
      formula: what its layout asks for.

    Returns:
      One line per difference.
    """
    written, formula = _totals(written), _totals(formula)
    lines = []
    for key in [*formula, *(key for key in written if key not in formula)]:
        kind, axes, gathers = key
        count, size, _ = written.get(key, (0, 0, ""))
        right_count, right_size, why = formula.get(key, (0, 0, ""))
        fewer = gathers and size <= right_size and count <= right_count
        if (count, size) != (right_count, right_size) and not fewer:
            lines.append(
                f"{kind} over {'*'.join(axes)}: the step writes {size} bytes in "
                f"{count} runs, the formula of the layout {right_size} in {right_count}"
                + (f" ({why})" if why else "")
            )
    return lines


def without_purpose(written: Iterable[WrittenCollective]) -> list[str]:
    """Lists the collectives without a purpose, one line each."""
    return [
        f"{x.kind} over {'*'.join(x.axes)}: the step writes {x.payload_bytes} bytes at "
        f"{x.source} and says not why; take it out, or write it inside "
        "meshpar.contracts.purposes.purpose(why)"
        for x in written
        if not x.why
    ]


def _totals(
    terms: Iterable[DeclaredCollective],
) -> dict[_Key, tuple[int, int, str]]:
    """{(kind, axes, whether they gather): (executions, bytes, purposes)}."""
    totals: dict[_Key, tuple[int, int, str]] = {}
    for term in terms:
        key = term.kind, term.axes, term.gathers
        count, size, why = totals.get(key, (0, 0, ""))
        totals[key] = (
            count + term.count,
            size + term.payload_bytes,
            f"{why}; {term.why}" if why else term.why,
        )
    return totals
