"""Reports of faults: how runs under each kind of fault and layout ended."""

import collections
from collections.abc import Sequence
from typing import Any

import rich.table
from rich.text import Text

from experiments.faults.conductor import RECOVERED, VERDICTS, Report
from experiments.faults.draws import KINDS
from meshpar.commands.reports import terminal

_ALL = "all"
Counts = dict[tuple[str, str], collections.Counter[str]]


def counts(reports: Sequence[Report]) -> Counts:
    """{(kind, scenario): {verdict: number of faults}}; one scenario is all of them."""
    found: Counts = collections.defaultdict(collections.Counter)
    for report in reports:
        for kind, _ in report.struck:
            for scenario in (report.scenario, _ALL):
                found[kind, scenario][report.verdict] += 1
    return found


def totals(reports: Sequence[Report]) -> dict[str, int]:
    """{verdict: number of faults}; a run that ends badly without one counts as one."""
    total = dict.fromkeys(VERDICTS, 0)
    for report in reports:
        at_least = 0 if report.verdict == RECOVERED else 1
        total[report.verdict] += max(len(report.struck), at_least)
    return total


def as_dict(reports: Sequence[Report], seed: int) -> dict[str, Any]:
    """The reports for programs, as JSON values."""
    struck = collections.Counter(
        (kind, report.scenario, section, report.verdict)
        for report in reports
        for kind, section in report.struck
    )
    names = "kind", "scenario", "section", "verdict", "number"
    return {
        "seed": seed,
        "scenarios": _scenarios(reports),
        "runs": len(reports),
        **totals(reports),
        "faults": [dict(zip(names, (*x, n), strict=True)) for x, n in struck.items()],
        "broken": [
            {"folder": str(report.folder), "verdict": report.verdict, "why": report.why}
            for report in reports
            if report.verdict != RECOVERED
        ],
    }


def _scenarios(reports: Sequence[Report]) -> list[str]:
    return list(dict.fromkeys(report.scenario for report in reports))


def _cell(found: collections.Counter) -> str:
    """The counts of a kind in a scenario; what did not recover is in capitals."""
    parts = [str(found[RECOVERED])] if found[RECOVERED] else []
    parts += [f"{found[v]} {v.upper()}" for v in VERDICTS[1:] if found[v]]
    return ", ".join(parts)


def _rows(reports: Sequence[Report]) -> list[list[str]]:
    """The table's head and rows: kinds of faults over scenarios."""
    found, scenarios = counts(reports), [*_scenarios(reports), _ALL]
    rows = [["recovered", *scenarios]]
    for kind in KINDS:
        if (kind, _ALL) in found:
            rows.append([kind, *(_cell(found[kind, x]) for x in scenarios)])
    return rows


def table(reports: Sequence[Report]) -> rich.table.Table:
    """Kinds of faults over scenarios: how many runs recovered, were lost or hung."""
    head, *rows = _rows(reports)
    result = rich.table.Table(*head)
    for kind, *cells in rows:
        bad = [any(map(str.isalpha, cell)) for cell in cells]
        styled = [
            Text(x, "bold red" if y else "") for x, y in zip(cells, bad, strict=True)
        ]
        result.add_row(kind, *styled)
    return result


def markdown(reports: Sequence[Report]) -> str:
    """The table as lines of markdown."""
    head, *rows = _rows(reports)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def line(report: Report) -> str:
    """One run in a line."""
    text = f"{report.scenario}: {len(report.struck)} faults, {report.verdict}"
    text += f", started {report.starts} time(s) by hand, {report.seconds:.0f} s"
    return f"{text}: {report.why}; see {report.folder}" if report.why else text


def summary(reports: Sequence[Report], seed: int) -> str:
    """The counts in a line."""
    numbers = ", ".join(f"{name} {n}" for name, n in totals(reports).items())
    scenarios = len(_scenarios(reports))
    return f"{numbers} ({scenarios} scenarios, {len(reports)} runs, seed {seed})"


def print_reports(reports: Sequence[Report], seed: int) -> None:
    """Prints the table and the counts."""
    console = terminal.wide_console()
    console.print(table(reports))
    console.print(summary(reports, seed))
