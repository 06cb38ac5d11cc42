"""Bubbles and held activations of published pipeline schedules, from their tables."""

import matplotlib.figure

from experiments.gallery.paper import Claim, Paper, Result, Setting
from meshpar.schedules import make_schedule
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
    """Most stage inputs that a stage holds, in units of whole stages, one by one."""
    most = 0
    for stage in range(schedule.num_stages):
        change: dict[int, int] = {}
        for op, tick in schedule.forward.items():
            if op.stage == stage:
                end = schedule.backward[op] + 1
                change[tick] = change.get(tick, 0) + 1
                change[end] = change.get(end, 0) - 1
        held = 0
        for tick in sorted(change):
            held += change[tick]
            most = max(most, held)
    return most / schedule.num_chunks


def walked(schedule: Schedule) -> float:
    """The bubble by a walk through the table: 1 - work of a stage / duration.

    A tick lasts as long as the slots that run in it, or as its busiest stage where the
    gradients of weights are apart (W); PipeDream runs all slots in all ticks.
    """
    cost = {"F": 1.0, "B": 1.0 if schedule.weight else 2.0, "W": 1.0}
    kinds = {"F": schedule.forward, "B": schedule.backward, "W": schedule.weight}
    ticks: dict[int, dict[int, list[str]]] = {}
    for kind, table in kinds.items():
        for op, tick in table.items():
            ticks.setdefault(tick, {}).setdefault(op.stage, []).append(kind)
    length = work = 0.0
    for stages in ticks.values():
        if schedule.asynchronous:
            length += cost["F"] + cost["B"]
        elif schedule.weight:
            length += max(sum(cost[k] for k in ks) for ks in stages.values())
        else:
            length += sum(cost[k] for k in {k for ks in stages.values() for k in ks})
        work += sum(cost[k] for k in stages.get(0, ()))
    return 1 - work / length


def out_of_order(schedule: Schedule) -> int:
    """Operations that begin before what they read is there."""
    wrong, last = 0, schedule.num_stages * schedule.num_chunks - 1
    at = {
        (op.microbatch, op.chunk * schedule.num_stages + op.stage): op
        for op in schedule.forward
    }
    for (m, place), op in at.items():
        forward, backward = schedule.forward[op], schedule.backward[op]
        wrong += place > 0 and schedule.forward[at[m, place - 1]] >= forward
        # The last stage may turn around within a tick, F before B.
        before = forward - 1 if place == last else schedule.backward[at[m, place + 1]]
        wrong += backward <= before
        wrong += bool(schedule.weight) and schedule.weight[op] < backward
    return wrong


def _closed_form(case: str, microbatches: int) -> float:
    """The bubble as the papers give it."""
    p, m = _STAGES, microbatches
    chunks = _CASES[case][1]
    return {
        "ZB-H1": (p - 1) / (3 * m + p - 1),
        "PipeDream": 2 * (p - 1) / (m + 2 * (p - 1)),
    }.get(case, (p - 1) / (chunks * m + p - 1))


def _claims(tables: dict[str, dict[int, Schedule]]) -> tuple[Claim, ...]:
    least, most = min(_MICROBATCHES), max(_MICROBATCHES)
    bubble = {case: tables[case][most].bubble() for case in _CASES}
    held = {case: [_held(table) for table in tables[case].values()] for case in _CASES}
    # The closed form of ZB-H1 holds from M = 2 P.
    off = max(
        max(abs(x - _closed_form(case, m)) for x in (table.bubble(), walked(table)))
        for case, tables_of_case in tables.items()
        for m, table in tables_of_case.items()
        if m >= 2 * _STAGES or not table.weight
    )
    wrong = sum(out_of_order(t) for by_m in tables.values() for t in by_m.values())
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
            "nothing begins before what it reads is there",
            "",
            f"{wrong} operations of {sum(map(len, tables.values()))} tables",
            wrong == 0,
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
