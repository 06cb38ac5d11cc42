"""lowering="auto": compiles both lowerings and takes the better program.

The better one sends fewer bytes that no compute hides; where both expose about the
same, it is the one that needs less memory.
"""

from meshpar.lowering.program import TrainProgram
from meshpar.mesh.platform import platform_of

_ABOUT = 1.05


def exposed_bytes(program: "TrainProgram") -> float:
    """Bytes that one device sends per step with no compute scheduled beside them."""
    return sum(c.wire_bytes for c in program.collectives if not c.overlapped)


def peak_bytes(program: "TrainProgram") -> int:
    """Bytes on one device at the peak of a step, as compiled."""
    analysis = program.compiled.memory_analysis()
    if not platform_of(program.mesh).reports_peak:
        # CPUs report a peak without temporaries.
        return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    return analysis.peak_memory_in_bytes


def pick_lowering(candidates: list["TrainProgram"]) -> tuple["TrainProgram", str]:
    """The best of programs of one layout, and why.

    Args:
      candidates: not compiled yet, or compiled; at least one.
    """
    for one in candidates:
        _ = one.compiler_log  # Compiles it, and keeps what `explain` wants to know.
    figures = [(exposed_bytes(one), peak_bytes(one)) for one in candidates]
    least = min(exposed for exposed, _ in figures)
    close = [i for i, (exposed, _) in enumerate(figures) if exposed <= _ABOUT * least]
    chosen = candidates[min(close, key=lambda i: figures[i][1])]
    said = "; ".join(
        f"{one.lowering.name} exposes {exposed / 1e6:.1f} MB a step and peaks at "
        f"{peak / 1e6:.1f} MB"
        for one, (exposed, peak) in zip(candidates, figures, strict=True)
    )
    return chosen, f"lowering=auto took {chosen.lowering.name}: {said}"
