r"""Measures training on one GPU, in one call of at most nine minutes.

    python -m experiments.benchmarks.gpu --json=gpu.json     # on a machine with a GPU
    python -m experiments.benchmarks.gpu --match=dots        # rows of some cases alone
    python -m experiments.benchmarks.gpu --topology=h100:1   # compiles, without a GPU
    python -m experiments.benchmarks.gpu --rehearse          # tiny models, any device

Llamas of 1 and 3 billion parameters are trained at 4,096 tokens by meshpar, a page of
jax and torch.compile: first by the settings that `meshpar plan` takes for the card,
then in float8 beside bfloat16, then by the same settings of each program; then settings
of meshpar are changed one by one. MFU counts 6 FLOPs for each weight and token, and
causal attention by half. Each row is a process with a limit of its own: a slow one is
lost alone. What matters most comes first; rows for which no time is left say so, and
`--match` measures them in a call of their own. Equality, cuDNN's attention against
plain jax, and the card itself are rows, too.
"""

import json
import pathlib
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import rich.table
from absl import flags

import meshpar
from experiments.benchmarks import gpu_cases, gpu_kernels, gpu_programs, gpu_torch
from experiments.benchmarks.gpu_cases import ROW, Case
from meshpar import mesh
from meshpar.commands import command_line
from meshpar.commands.reports import terminal
from meshpar.mesh import chips
from meshpar.settings import Number

SECONDS = flags.DEFINE_integer("seconds", 520, "Time for everything.")
JSON = flags.DEFINE_string("json", "", "File for all rows, as JSON.")
TOPOLOGY = flags.DEFINE_string(
    "topology", "", "Compile for such a machine (h100:1) and run nothing."
)
REHEARSE = flags.DEFINE_bool("rehearse", False, "Tiny models, on any device.")
MEMORY = flags.DEFINE_float("memory", 0.0, "GB of the card; 0 asks it.")
MATCH = flags.DEFINE_string(
    "match", "", "Rows whose program and case match this regex."
)
_PART = flags.DEFINE_string("part", "", "The part that this process measures.")
_CASE = flags.DEFINE_string(
    "case", "", "The case that this process measures, as JSON; the first by default."
)
_PROFILE = flags.DEFINE_bool("profile", False, "Add which kernels take how long.")
command_line.limit(SECONDS, Number(60, 10**5, "seconds"))

DEVICE, CHECKS, VERIFY = "device", "checks", "verify"
OURS, PAGE, TORCH = "ours", "page", "torch"
_RUNNERS = {OURS: gpu_programs.run_ours, PAGE: gpu_programs.run_page}
_FAILED = "failed:"
_TOLERANCE = 1e-2
"""Largest relative difference of losses in bfloat16 that counts as rounding."""
_OTHERS = gpu_programs.PAGE, gpu_torch.PROGRAM


_FASTER = 4
"""A rehearsal is faster by this factor, at least."""


class Job(NamedTuple):
    """The measurement of one process.

    Attributes:
      part: which program, or what else.
      expected: seconds that it took, or should take.
      case: how a program trains.
      profiles: whether to say which kernels take how long.
    """

    part: str
    expected: float = 15.0
    case: Case | None = None
    profiles: bool = False

    @property
    def limit(self) -> float:
        """Seconds after which it is killed."""
        return 1.4 * self.expected + 10

    def __str__(self) -> str:
        return f"{self.part} {self.case.describe() if self.case else ''}"

    @property
    def words(self) -> list[str]:
        """The words of the process's command."""
        words = ["-m", "experiments.benchmarks.gpu", f"--part={self.part}"]
        if self.case is not None:
            words += [f"--case={json.dumps(self.case._asdict())}"]
        words += ["--profile"] * self.profiles + ["--rehearse"] * REHEARSE.value
        return words


def main(_: Sequence[str]) -> int:
    """Measures, prints tables; returns 1 if a check fails."""
    if _PART.value:
        _run_part(_PART.value)
        return 0
    if TOPOLOGY.value:
        rows = _compiled_rows()
    else:
        rows = list(_measured_rows())
        rows += different_losses(rows)
    terminal.wide_console().print(_table(rows))
    if JSON.value:
        pathlib.Path(JSON.value).write_text(json.dumps(rows, indent=1) + "\n")
    is_wrong = any(row["status"].startswith(("WRONG", "failed")) for row in rows)
    return 1 if is_wrong else 0


def _run_part(part: str) -> None:
    case = gpu_cases.same_cases()[0]
    if _CASE.value:
        case = Case(**json.loads(_CASE.value))
    case = case.rehearsed() if REHEARSE.value else case
    try:
        if part == DEVICE:
            gpu_kernels.run_device(REHEARSE.value)
        elif part == CHECKS:
            gpu_programs.run_checks(REHEARSE.value)
        elif part == VERIFY:
            gpu_programs.run_verify()
        elif part == TORCH:
            gpu_torch.run(case, REHEARSE.value)
        else:
            _RUNNERS[part](case, REHEARSE.value, _PROFILE.value)
    except Exception as error:
        if not gpu_cases.is_out_of_memory(error):
            raise
        gpu_cases.emit(program=part, case=case.describe(), status="out of memory")


def jobs(memory_gb: float) -> Iterator[Job]:
    """The measurements, in order.

    Args:
      memory_gb: of the card.
    """
    best, same = gpu_cases.best_cases(memory_gb), gpu_cases.same_cases()
    yield Job(VERIFY)
    yield Job(CHECKS)
    for part in (OURS, PAGE):
        for case in best:
            # Compiling takes as many seconds for each layer outside of a loop.
            yield Job(part, 20 + 2.2 * case.unroll, case, profiles=part == OURS)
    looped = same[0]._replace(remat="dots")
    yield Job(OURS, 30, looped)
    yield Job(OURS, 35, looped._replace(float8=True))
    yield Job(TORCH, 60, looped)
    for case in same:
        for part in (OURS, PAGE, TORCH):
            yield Job(part, 60 if part == TORCH else 30, case)
    for case in gpu_cases.other_cases(best):
        yield Job(OURS, 20 + 2.2 * case.unroll, case)


def _measured_rows() -> Iterator[dict[str, Any]]:
    """The rows of all processes, printed as they come."""
    end, memory_gb = time.perf_counter() + SECONDS.value, MEMORY.value
    for row in _rows_of(Job(DEVICE), end):
        memory_gb = memory_gb or row.get("limit_gb", 0.0)
        yield row
    for job in jobs(memory_gb):
        if re.search(MATCH.value, str(job)):
            yield from _rows_of(job, end)


def _rows_of(job: Job, end: float) -> Iterator[dict[str, Any]]:
    """The rows that a process prints, or one that says why there are none.

    Args:
      job: what it measures.
      end: of all jobs, as `time.perf_counter` gives it.
    """
    case = job.case.describe() if job.case else ""
    seconds, found = min(job.limit, end - time.perf_counter()), 0
    if seconds < job.expected / (_FASTER if REHEARSE.value else 1):
        yield dict(program=job.part, case=case, status="no time left")
        return
    begin = time.perf_counter()
    last = ""
    for line in _lines([sys.executable, *job.words], seconds):
        last = line.strip() or last
        if line.startswith(ROW):
            row, found = json.loads(line.removeprefix(ROW)), found + 1
            row["process_s"] = time.perf_counter() - begin
            print(_brief(row), flush=True)
            yield row
    if not found or last.startswith(_FAILED):
        row = dict(program=job.part, case=case, status=last or f"{_FAILED} no row")
        print(_brief(row), flush=True)
        yield row


def different_losses(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows for cases in which another program begins with another loss than meshpar."""
    ours = {
        row["batch"]: row["first_loss"]
        for row in rows
        if row["program"] == gpu_programs.OURS and "first_loss" in row
    }
    others = (row for row in rows if row["program"] in _OTHERS and "first_loss" in row)
    return [
        dict(
            program="first loss",
            case=row["case"],
            status=f"WRONG: meshpar {want:.4f}, {row['program']} {found:.4f}",
        )
        for row in others
        if (want := ours.get(row["batch"])) is not None
        and abs((found := row["first_loss"]) - want) > _TOLERANCE * want
    ]


def _lines(command: Sequence[str], seconds: float) -> Iterator[str]:
    """Lines that a process writes until it ends, or is killed after some seconds.

    The last one begins with `_FAILED` if the process did not end well.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: queue.Queue = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line.rstrip("\n"))
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    end, last = time.perf_counter() + seconds, ""
    try:
        while True:
            left = max(0, end - time.perf_counter())
            line = lines.get(timeout=left)
            if line is None:
                break
            last = line.strip() or last
            yield line
        if process.wait():
            yield f"{_FAILED} exit code {process.returncode}: {last}"
    except queue.Empty:
        yield f"{_FAILED} not done after {seconds:.0f} s"
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()


def _compiled_rows() -> list[dict[str, Any]]:
    """Rows of meshpar's programs and the page from a compiler, without a GPU."""
    meshpar.simulate(1)
    (device,) = mesh.topology(TOPOLOGY.value)
    rows = []
    memory_gb = MEMORY.value or chips.chip_of(device.device_kind).memory_bytes / 1e9
    for case in gpu_cases.best_cases(memory_gb):
        for name, compile_it in gpu_programs.COMPILERS.items():
            begin = time.perf_counter()
            found = gpu_programs.facts(compile_it(case, REHEARSE.value, device))
            seconds = time.perf_counter() - begin
            row = dict(program=name, case=case.describe(), status="ok")
            rows.append(row | {"compile_s": seconds} | found)
            print(_brief(rows[-1]), flush=True)
    return rows


_COLUMNS = {
    "ms": "{:.1f}",
    "spread": "{:.1%}",
    "mfu": "{:.1%}",
    "tokens_per_second": "{:,.0f}",
    "peak_gb": "{:.1f}",
    "compile_s": "{:.0f}",
    "first_loss": "{:.4f}",
    "large_copies": "{}",
    "clocks.sm": "{}",
    "power.draw": "{}",
}
"""{key of a row: its form} in the table; lines and JSON have all keys."""


def _brief(row: dict[str, Any]) -> str:
    """One line of a row."""
    found = [f"{k}={v}" for k, v in row.items() if k not in ("program", "case")]
    return f"{row['program']} | {row['case']} | {', '.join(found)}"


def _table(rows: Sequence[dict[str, Any]]) -> rich.table.Table:
    """All rows under the facts of the device; columns that some of the rows have."""
    device = [row for row in rows if row["program"] == DEVICE]
    rows = [row for row in rows if row["program"] != DEVICE]
    columns = [name for name in _COLUMNS if any(name in row for row in rows)]
    table = rich.table.Table("program", "case", "status", *columns)
    table.title = "\n".join(map(_brief, device)) or None
    for row in rows:
        cells = [
            _COLUMNS[name].format(row[name]) if row.get(name) is not None else ""
            for name in columns
        ]
        table.add_row(row["program"], row["case"], row["status"], *cells)
    return table


if __name__ == "__main__":
    command_line.run(main)
