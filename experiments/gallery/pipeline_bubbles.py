"""Bubbles and held activations of published pipeline schedules, from their tables."""

import matplotlib.figure

from experiments.gallery.paper import Claim, Paper, Result, Setting
from meshpar.schedules import make_schedule
from meshpar.schedules.published import formula
from meshpar.schedules.table import Schedule

_STAGES = 8
_MICROBATCHES = (8, 16, 32, 64)
_CASES = {
    "GPipe": ("gpipe", 1),
    "1F1B": ("1f1b", 1),
    "interleaved, V=2": ("interleaved", 2),
    "interleaved, V=4": ("interleaved", 4),
    "ZB-H1": ("zb_h1", 1),
    "PipeDream": ("pipedream", 1),
}
"""{name: (schedule, chunks per stage)}."""


def _held(schedule: Schedule) -> float:
    """Most stage inputs that a stage holds, in units of whole stages."""
    return max(schedule.in_flight()) / schedule.num_chunks


def _claims(tables: dict[str, dict[int, Schedule]]) -> tuple[Claim, ...]:
    least, most = min(_MICROBATCHES), max(_MICROBATCHES)
    bubble = {case: tables[case][most].bubble() for case in _CASES}
    held = {case: [_held(table) for table in tables[case].values()] for case in _CASES}
    # The closed form of ZB-H1 holds from M = 2 P.
    off = max(
        abs(table.bubble() - formula(table)[0])
        for tables_of_case in tables.values()
        for m, table in tables_of_case.items()
        if m >= 2 * _STAGES or not table.weight
    )
    gain = bubble["1F1B"] / bubble["interleaved, V=4"]
    zero = bubble["1F1B"] / bubble["ZB-H1"]
    return (
        Claim(
            "bubbles follow the closed forms of the papers",
            "(P-1)/(VM+P-1), and others",
            f"at most {off:.0e} off",
            off < 1e-9,
        ),
        Claim(
            f"4 chunks per stage make the bubble 4 times smaller (M={most})",
            "V times, against the time of the work",
            f"{gain:.2f} times, against the step",
            3.5 < gain <= 4,
        ),
        Claim(
            f"ZB-H1 against 1F1B (M={most})",
            "a third",
            f"{zero:.2f} times smaller",
            2.5 < zero <= 3.2,
        ),
        Claim(
            "1F1B holds as many activations whatever the microbatches",
            "at most P (F and B in turns)",
            f"at most 2P-1 = {held['1F1B'][-1]:.0f} (F and B in one tick)",
            max(held["1F1B"]) == held["1F1B"][-1] == held["1F1B"][1] < 2 * _STAGES,
        ),
        Claim(
            "GPipe holds all microbatches",
            "M",
            f"{held['GPipe'][0]:.0f} to {held['GPipe'][-1]:.0f}",
            [held["GPipe"][0], held["GPipe"][-1]] == [least, most],
        ),
    )


def _run(setting: Setting) -> Result:
    tables: dict[str, dict[int, Schedule]] = {}
    for index, (case, (name, chunks)) in enumerate(_CASES.items()):
        setting.progress(case, index / len(_CASES))
        tables[case] = {
            m: make_schedule(name, _STAGES, m, chunks) for m in _MICROBATCHES
        }
    bubbles = {
        case: {m: table.bubble() for m, table in tables_of_case.items()}
        for case, tables_of_case in tables.items()
    }
    held = {case: _held(tables[case][max(_MICROBATCHES)]) for case in _CASES}
    rows = [
        (case, *(f"{bubbles[case][m]:.3f}" for m in _MICROBATCHES), f"{held[case]:g}")
        for case in _CASES
    ]

    def draw(figure: matplotlib.figure.Figure) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for case in _CASES:
            # The lines of GPipe and 1F1B are the same.
            style = {"PipeDream": "o--", "1F1B": "s:"}.get(case, "o-")
            left.plot(_MICROBATCHES, list(bubbles[case].values()), style, label=case)
        left.set(xlabel="microbatches M", ylabel="bubble", xscale="log", ylim=0)
        left.set_xticks(_MICROBATCHES, map(str, _MICROBATCHES))
        left.minorticks_off()
        left.legend(fontsize=8)
        right.barh(list(held), list(held.values()))
        right.invert_yaxis()
        right.set(xlabel=f"stage inputs held, M={max(_MICROBATCHES)}")

    return Result(
        (
            f"schedule, P={_STAGES}",
            *(f"bubble, M={m}" for m in _MICROBATCHES),
            f"stage inputs held, M={max(_MICROBATCHES)}",
        ),
        tuple(rows),
        _claims(tables),
        {"stages": _STAGES, "bubbles": bubbles, "held": held},
        draw,
    )


PAPER = Paper(
    name="pipeline_bubbles",
    title="Pipeline schedules: bubbles and held activations",
    source="Narayanan et al., arXiv:1806.03377 and arXiv:2104.04473, section 2.2; Qi "
    "et al., arXiv:2401.10241, section 3.1",
    shows="bubble over microbatches of GPipe, 1F1B, interleaving, zero bubble and "
    "PipeDream, from the tables that the executor runs",
    run=_run,
)
