"""What a step writes against the formula of its layout, which needs no trace.

Planners know the traffic of a layout by formula alone. Where both say the same, a
formula is right, and a step lacks no reduction.
"""

from collections.abc import Iterable

from meshpar.contracts.declared import DeclaredCollective

_Key = tuple[str, tuple[str, ...]]


def formula_violations(
    written: Iterable[DeclaredCollective], formula: Iterable[DeclaredCollective]
) -> list[str]:
    """Compares bytes and executions, by kind and axes.

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
        count, size, gathers, _ = written.get(key, (0, 0, True, ""))
        right_count, right_size, may_drop, why = formula.get(key, (0, 0, False, ""))
        fewer = gathers and may_drop and size <= right_size and count <= right_count
        if (count, size) != (right_count, right_size) and not fewer:
            kind, axes = key
            lines.append(
                f"{kind} over {'*'.join(axes)}: the step writes {size} bytes in "
                f"{count} runs, the formula of the layout {right_size} in {right_count}"
                + (f" ({why})" if why else "")
            )
    return lines


def _totals(
    terms: Iterable[DeclaredCollective],
) -> dict[_Key, tuple[int, int, bool, str]]:
    """{(kind, axes): (executions, bytes, whether all gather, purposes)}."""
    totals: dict[_Key, tuple[int, int, bool, str]] = {}
    for term in terms:
        key = term.kind, term.axes
        count, size, gathers, why = totals.get(key, (0, 0, True, ""))
        totals[key] = (
            count + term.count,
            size + term.payload_bytes,
            gathers and term.gathers,
            f"{why}; {term.why}" if why else term.why,
        )
    return totals
