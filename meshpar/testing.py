"""Checks of steps for a test suite: `assert_step`."""

from collections.abc import Callable, Sequence
from typing import Any

from meshpar.checker import Report, check


def assert_step(
    step: Any,
    *arguments: Any,
    no: str | Sequence[str] = "any",
    against: str | Callable | None = None,
    most_bytes: float | None = None,
    **options: Any,
) -> Report:
    """Asserts that a step has none of what it must not have.

    Args:
      step: as for `meshpar.check`.
      *arguments: of the step.
      no: what is forbidden, as for `Report.assert_no`: rules, kinds of collectives over
        axes, sizes. By default everything that any rule finds.
      against: "one device", or a function: the results have to be equal.
      most_bytes: that one device may send per step.
      **options: the others of `meshpar.check`.

    Returns:
      The report.

    Raises:
      AssertionError: the step has some of it; the message has sizes and lines.
    """
    report = check(step, *arguments, against=against, **options)
    report.assert_no(*([no] if isinstance(no, str) else no))
    if report.equality is not None and not report.equality.ok:
        raise AssertionError(str(report.equality))
    if most_bytes is not None and report.facts.wire_bytes > most_bytes:
        raise AssertionError(f"{most_bytes:.0f} bytes are allowed\n{report}")
    return report
