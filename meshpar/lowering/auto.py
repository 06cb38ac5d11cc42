"""lowering="auto": compiles both lowerings and takes the better program.

The better one takes less time, where the compiler says what its instructions take
(TPUs). Elsewhere it sends fewer bytes that no compute hides. If both do about the same,
it is the one that needs less memory.
"""

import dataclasses

from meshpar.lowering.train_program import TrainProgram

_SAME_TIME, _SAME_TRAFFIC = 1.02, 1.05
"""Figures within this factor of the least count as about the same."""


def pick_lowering(candidates: list[TrainProgram]) -> TrainProgram:
    """The best of programs of one layout; its `why_auto` says why.

    Args:
      candidates: compiled or not; at least one.
    """
    for program in candidates:
        # Compiles the program, and keeps the compiler's lines for `explain`.
        _ = program.inspection.compiler_log
    inspections = [program.inspection for program in candidates]
    times = [inspection.time for inspection in inspections]
    if None not in times:
        costs, about = [1e3 * time.seconds for time in times], _SAME_TIME
        text = "needs {:.1f} ms a step by the compiler's schedule"
    else:
        costs, about = [i.exposed_bytes / 1e6 for i in inspections], _SAME_TRAFFIC
        text = "exposes {:.1f} MB a step"
    peaks = [inspection.peak_bytes for inspection in inspections]
    close = [i for i, cost in enumerate(costs) if cost <= about * min(costs)]
    chosen = candidates[min(close, key=peaks.__getitem__)]
    comparison = "; ".join(
        f"{program.lowering.name} {text.format(cost)} and peaks at {peak / 1e6:.1f} MB"
        for program, cost, peak in zip(candidates, costs, peaks, strict=True)
    )
    why = f"lowering=auto took {chosen.lowering.name}: {comparison}"
    return dataclasses.replace(chosen, why_auto=why)
