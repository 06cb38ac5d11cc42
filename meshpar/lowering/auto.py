"""lowering="auto": compiles both lowerings and takes the better program.

The better one sends fewer bytes that no compute hides; where both expose about the
same, it is the one that needs less memory.
"""

import dataclasses

from meshpar.lowering.train_program import TrainProgram

_ABOUT = 1.05
"""Exposed bytes within this factor of the least count as about the same."""


def pick_lowering(candidates: list[TrainProgram]) -> TrainProgram:
    """The best of programs of one layout; its `why_auto` says why.

    Args:
      candidates: compiled or not; at least one.
    """
    for program in candidates:
        # Compiles the program, and keeps the compiler's lines for `explain`.
        _ = program.inspection.compiler_log
    inspections = [program.inspection for program in candidates]
    figures = [(i.exposed_bytes, i.peak_bytes) for i in inspections]
    least = min(exposed for exposed, _ in figures)
    close = [i for i, (exposed, _) in enumerate(figures) if exposed <= _ABOUT * least]
    chosen = candidates[min(close, key=lambda i: figures[i][1])]
    comparison = "; ".join(
        f"{program.lowering.name} exposes {exposed / 1e6:.1f} MB a step and peaks at "
        f"{peak / 1e6:.1f} MB"
        for program, (exposed, peak) in zip(candidates, figures, strict=True)
    )
    why = f"lowering=auto took {chosen.lowering.name}: {comparison}"
    return dataclasses.replace(chosen, why_auto=why)
