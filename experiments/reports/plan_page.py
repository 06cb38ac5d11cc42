"""HTML page of a plan: the best layouts, time over memory, and why others lost."""

import html
from collections.abc import Sequence

from experiments.reports import html_page
from experiments.reports.planning import largest_terms, pareto_figure, summary
from experiments.reports.units import readable_bytes, readable_seconds
from meshpar.explain.report import Explanation
from meshpar.planner.candidate import Candidate
from meshpar.planner.plans import Plans


def _candidates(plans: Plans, candidates: Sequence[Candidate]) -> str:
    header = "layout", "step", "memory", "sent", "its time goes to", "against the best"
    rows = [
        (
            str(c.layout),
            readable_seconds(c.seconds.total),
            float(c.memory.total),
            float(c.wire_bytes),
            largest_terms(c),
            plans.why_not(c),
        )
        for c in candidates
    ]
    return html_page.table(header, rows)


def _compiled(plans: Plans, compiled: Sequence[Explanation]) -> str:
    """Predictions beside what was compiled, with a line for all that is wrong."""
    if not compiled:
        return ""
    rows, wrong, budget = [], [], plans.machine.memory_bytes
    for candidate, explanation in zip(plans.best, compiled, strict=False):
        memory, peak = candidate.memory.total, explanation.compiled_bytes["peak"]
        time = explanation.time
        cells = float(memory), float(peak), f"{memory / peak - 1:+.1%}"
        predicted = readable_seconds(candidate.seconds.total)
        estimated = readable_seconds(time.seconds) if time else "-"
        rows.append((explanation.layout, *cells, predicted, estimated))
        lines = list(explanation.violations)
        if peak > budget:
            lines.append(
                f"needs {readable_bytes(peak)} of {readable_bytes(budget)} a device"
            )
        wrong += [f"{explanation.layout}: {line}" for line in lines]
    verdict = "".join(f'<p class="bad">{html.escape(line)}</p>' for line in wrong)
    if not wrong:
        verdict = (
            '<p class="good">The compiled programs keep their contracts, and fit.</p>'
        )
    header = "layout", "memory", "compiled", "error", "step", "estimated"
    return f"<h2>Predicted and compiled</h2>{verdict}{html_page.table(header, rows)}"


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
        f"<h2>Time over memory</h2>{html_page.picture(pareto_figure(plans))}"
        f"<h2>Less time or less memory than all others</h2>{_candidates(plans, front)}"
        f"<h2>Too large</h2><p>Those that lack least. A device has "
        f"{readable_bytes(plans.machine.memory_bytes)} for a step.</p>"
        f"{_candidates(plans, plans.too_large[:top])}"
        "<h2>Refused</h2><p>N stands for numbers.</p>"
        f"{html_page.table(('layouts', 'reason'), [(n, r) for r, n in refused])}"
    )
    html_page.write(path, title, body)
