"""The figures of real compilers for the programs of `program_cases`.

They are compiled ahead of time for machines that need not be present. What the compiler
says stands in `compiled_programs.json` beside this file, and
`experiments.benchmarks.predictions` holds the planner's predictions against it.
"""

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

from experiments.benchmarks.program_cases import CASES, Case

FILE = pathlib.Path(__file__).with_suffix(".json")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The figures of a compiler for a program.

    Attributes:
      case: the program.
      jax: version of jax, which brings the compiler.
      date: of the compilation.
      peak_bytes: memory of one device at the peak.
      compute_seconds: of the compiler's schedule; None where it states no cycles.
      exposed_seconds: for which transfers outlast the compute beside them.
      violations: number of the ways in which the program breaks its contract.
    """

    case: Case
    jax: str
    date: str
    peak_bytes: int
    compute_seconds: float | None
    exposed_seconds: float | None
    violations: int

    @classmethod
    def of(cls, entry: dict[str, Any]) -> "Compiled":
        """The figures that a JSON object states."""
        return cls(**{**entry, "case": Case(**entry["case"])})

    @property
    def jax_line(self) -> str:
        """The version of jax without the patch, such as "0.12"."""
        return ".".join(self.jax.split(".")[:2])

    @property
    def seconds(self) -> float | None:
        """Estimated time of a step; None where the compiler states no cycles."""
        if self.compute_seconds is None:
            return None
        return self.compute_seconds + self.exposed_seconds


def read() -> list[Compiled]:
    """The figures that compilers have given so far."""
    return [Compiled.of(entry) for entry in json.loads(FILE.read_text())]


def write(compiled: Sequence[Compiled]) -> None:
    """Stores the compilers' figures of programs, beside those already stored."""
    stored = {(c.case, c.jax_line): c for c in read()} if FILE.exists() else {}
    stored |= {(c.case, c.jax_line): c for c in compiled}
    order = {case: index for index, case in enumerate(CASES)}
    every = [c for c in stored.values() if c.case in order]
    every.sort(key=lambda c: (c.jax_line, order[c.case]))
    lines = ",\n".join(json.dumps(dataclasses.asdict(c)) for c in every)
    FILE.write_text(f"[\n{lines}\n]\n")


def compile_case(case: Case) -> Compiled:
    """Compiles a program."""
    program = case.program()
    inspection = program.inspection
    time = inspection.time
    return Compiled(
        case=case,
        jax=jax.__version__,
        date=datetime.date.today().isoformat(),
        peak_bytes=inspection.peak_bytes,
        compute_seconds=time and time.compute_seconds,
        exposed_seconds=time and time.exposed_seconds,
        violations=len(program.violations()),
    )
