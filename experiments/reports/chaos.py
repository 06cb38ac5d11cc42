"""Reports of faults: how many of each kind runs survived in each section."""

import collections
from collections.abc import Sequence
from typing import Any

import rich.table
from rich.text import Text

from experiments.faults.conductor import SURVIVED, VERDICTS, Report
from experiments.faults.draws import KINDS
from meshpar.commands.reports import terminal
from meshpar.multihost.watchdog import SECTIONS


def counts(reports: Sequence[Report]) -> dict[tuple[str, str], collections.Counter]:
    """{(kind, section): {verdict: number of faults}}."""
    found: dict[tuple[str, str], collections.Counter] = {}
    for report in reports:
        for struck in report.struck:
            found.setdefault(struck, collections.Counter())[report.verdict] += 1
    return found


def totals(reports: Sequence[Report]) -> dict[str, int]:
    """{verdict: number of faults}; a run that ends badly without one counts as one."""
    total = dict.fromkeys(VERDICTS, 0)
    for report in reports:
        at_least = 0 if report.verdict == SURVIVED else 1
        total[report.verdict] += max(len(report.struck), at_least)
    return total


def as_dict(reports: Sequence[Report], seed: int) -> dict[str, Any]:
    """The reports for programs, as JSON values."""
    return {
        "seed": seed,
        "scenarios": list(dict.fromkeys(report.scenario for report in reports)),
        "runs": len(reports),
        **totals(reports),
        "faults": [
            {"kind": kind, "section": section}
            | {verdict: found[verdict] for verdict in VERDICTS}
            for (kind, section), found in counts(reports).items()
        ],
        "broken": [
            {"folder": str(report.folder), "verdict": report.verdict, "why": report.why}
            for report in reports
            if report.verdict != SURVIVED
        ],
    }


def _cell(found: collections.Counter) -> Text:
    """The counts of one kind in one section."""
    bad = {verdict: found[verdict] for verdict in VERDICTS[1:] if found[verdict]}
    parts = [str(found[SURVIVED])] if found[SURVIVED] else []
    parts += [f"{number} {verdict.upper()}" for verdict, number in bad.items()]
    return Text(", ".join(parts), "bold red" if bad else "")


def table(reports: Sequence[Report]) -> rich.table.Table:
    """Kinds of faults over sections: how many were survived, lost or hung."""
    found, result = counts(reports), rich.table.Table("survived", *SECTIONS, "all")
    for kind in KINDS:
        cells = [found.get((kind, s), collections.Counter()) for s in SECTIONS]
        if any(cells):
            total = sum(cells, collections.Counter())
            result.add_row(kind, *map(_cell, [*cells, total]))
    return result


def line(report: Report) -> str:
    """One run in a line."""
    text = f"{report.scenario}: {len(report.struck)} faults, {report.verdict}"
    text += f", started {report.starts} time(s) by hand, {report.seconds:.0f} s"
    return f"{text}: {report.why}; see {report.folder}" if report.why else text


def print_reports(reports: Sequence[Report], seed: int) -> None:
    """Prints the table and the counts."""
    console = terminal.wide_console()
    console.print(table(reports))
    numbers = ", ".join(f"{name} {n}" for name, n in totals(reports).items())
    scenarios = len({report.scenario for report in reports})
    console.print(
        f"{numbers} ({scenarios} scenarios, {len(reports)} runs, seed {seed})"
    )
