"""HTML page of a plan: the best layouts, time over memory, and why others lost."""

import html
from collections.abc import Sequence

from meshpar import html_page
from meshpar.commands.reports import pictures
from meshpar.commands.reports.planning import (
    COMPILED,
    candidate_row,
    compiled_rows,
    faults,
    pareto_figure,
    summary,
)
from meshpar.explain.report import Explanation
from meshpar.planner.candidate import Candidate
from meshpar.planner.plans import Plans
from meshpar.units import readable_bytes


def _candidates(plans: Plans, candidates: Sequence[Candidate]) -> str:
    header = "layout", "step", "memory", "sent", "its time goes to", "against the best"
    return html_page.table(header, [candidate_row(plans, c) for c in candidates])


def _compiled(plans: Plans, compiled: Sequence[Explanation]) -> str:
    """A table of predictions and compiled figures, with a line for each fault."""
    if not compiled:
        return ""
    wrong = [f"{e.layout}: {line}" for e in compiled for line in faults(plans, e)]
    verdict = "".join(f'<p class="bad">{html.escape(line)}</p>' for line in wrong)
    if not wrong:
        verdict = (
            '<p class="good">The compiled programs keep their contracts, and fit.</p>'
        )
    table = html_page.table(COMPILED, compiled_rows(plans, compiled))
    return f"<h2>Predicted and compiled</h2>{verdict}{table}"


def write(
    path: str, title: str, plans: Plans, compiled: Sequence[Explanation], top: int
) -> None:
    """Writes the page; it needs no other file.

    Args:
      path: where to write it.
      title: the model and the machine.
      plans: the plans.
      compiled: the first of `plans.best`, compiled.
      top: layouts to list.
    """
    front = [c for c in plans.pareto if c not in plans.best]
    refused = sorted(plans.refused.items(), key=lambda item: -item[1])
    body = (
        f"<p>{html.escape(summary(plans))}.</p>"
        f"<h2>Predicted to be fastest</h2>{_candidates(plans, plans.best[:top])}"
        f"{_compiled(plans, compiled)}"
        f"<h2>Time over memory</h2>{pictures.picture(pareto_figure(plans))}"
        f"<h2>Less time or less memory than all others</h2>{_candidates(plans, front)}"
        f"<h2>Too large</h2><p>Those that lack least. A device has "
        f"{readable_bytes(plans.machine.memory_bytes)} for a step.</p>"
        f"{_candidates(plans, plans.too_large[:top])}"
        "<h2>Refused</h2><p>N stands for numbers.</p>"
        f"{html_page.table(('layouts', 'reason'), [(n, r) for r, n in refused])}"
    )
    html_page.write(path, title, body)
