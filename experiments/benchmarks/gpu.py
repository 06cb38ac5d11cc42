r"""Measures training on one GPU, in one call of at most nine minutes.

    python -m experiments.benchmarks.gpu --json=gpu.json     # on a machine with a GPU
    python -m experiments.benchmarks.gpu --topology=h100:1   # compiles, without a GPU
    python -m experiments.benchmarks.gpu --rehearse          # tiny models, any device

First what runs is checked: a verification, and attention by cuDNN against plain jax.
Then Llamas of 1 and 3 billion parameters are trained at 4,096 and 8,192 tokens, by
meshpar, a page of jax and torch.compile, and settings are tried on the first of them.
MFU counts 6 FLOPs for each weight and token, and causal attention by half. Each part
is a process of its own with a share of the time: what one loses is not lost for others.
"""

import json
import pathlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import rich.table
from absl import flags

import meshpar
from experiments import command_line
from experiments.benchmarks import gpu_cases, gpu_programs, gpu_torch
from experiments.benchmarks.gpu_cases import ROW, Budget
from experiments.reports import terminal
from meshpar import mesh
from meshpar.settings import Number

SECONDS = flags.DEFINE_integer("seconds", 520, "Time for everything.")
JSON = flags.DEFINE_string("json", "", "File for all rows, as JSON.")
TOPOLOGY = flags.DEFINE_string(
    "topology", "", "Compile for such a machine (h100:1) and run nothing."
)
REHEARSE = flags.DEFINE_bool("rehearse", False, "Tiny models, on any device.")
_PART = flags.DEFINE_string("part", "", "The part that this process measures.")
command_line.limit(SECONDS, Number(60, 10**5, "seconds"))

CHECKS, OURS, PAGE, TORCH = "checks", "ours", "page", "torch"
_SHARES = {CHECKS: 0.15, PAGE: 0.2, TORCH: 0.2, OURS: 1.0}
"""Share of the time that is left which a part may take, in order."""
_FAILED = "failed:"
_TOLERANCE = 1e-2
"""Largest relative difference of losses in bfloat16 that counts as rounding."""
_VERIFY = "--recipe=tiny", "--layout=data=1,microbatches=2,remat=full", "--devices=1"


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
    cases, rehearsal = gpu_cases.first_cases(), REHEARSE.value
    budget = Budget(SECONDS.value)
    if part == CHECKS:
        gpu_programs.run_checks(rehearsal)
    elif part == OURS:
        gpu_programs.run_ours(cases, rehearsal, budget)
    elif part == PAGE:
        gpu_programs.run_page(cases, rehearsal, budget)
    else:
        gpu_torch.run(cases, rehearsal, budget)


def _measured_rows() -> Iterator[dict[str, Any]]:
    """The rows of all parts, printed as they come."""
    end = time.perf_counter() + SECONDS.value
    yield _verified(SECONDS.value * _SHARES[CHECKS])
    for part, share in _SHARES.items():
        seconds = share * (end - time.perf_counter())
        words = [f"--part={part}", f"--seconds={max(60, round(seconds))}"]
        words += ["--rehearse"] * REHEARSE.value
        command = [sys.executable, "-m", "experiments.benchmarks.gpu", *words]
        # A compilation that does not end is killed with its process.
        for line in _lines(command, seconds + 20):
            if line.startswith(ROW):
                row = json.loads(line.removeprefix(ROW))
                print(_brief(row), flush=True)
                yield row
            elif line.startswith(_FAILED):
                yield dict(program=part, case="", status=line)


def different_losses(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows for cases in which meshpar and the page of jax begin with other losses."""
    ours, page = (
        {
            r["case"]: r["first_loss"]
            for r in rows
            if r["program"] == name and "first_loss" in r
        }
        for name in (gpu_programs.OURS, gpu_programs.PAGE)
    )
    return [
        dict(
            program="first loss",
            case=case,
            status=f"WRONG: meshpar {ours[case]:.4f}, page {page[case]:.4f}",
        )
        for case in ours.keys() & page.keys()
        if abs(ours[case] - page[case]) > _TOLERANCE * page[case]
    ]


def _verified(seconds: float) -> dict[str, Any]:
    """The row of a verification on this machine."""
    command = [sys.executable, "-m", "experiments.verify", *_VERIFY]
    lines = list(_lines(command, seconds))
    verdict = lines[-1].strip()
    status = "ok" if verdict.startswith("EQUAL") else f"WRONG: {verdict}"
    return dict(program="verify", case=" ".join(_VERIFY), status=status)


def _lines(command: Sequence[str], seconds: float) -> Iterator[str]:
    """Lines that a process writes until it ends, or is killed after some seconds.

    The last one begins with `_FAILED` if the process did not end well.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
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
    """What a compiler says of meshpar's programs and the page, without a machine."""
    meshpar.simulate(1)
    (device,) = mesh.topology(TOPOLOGY.value)
    rows = []
    for case in gpu_cases.first_cases():
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
    "mfu": "{:.1%}",
    "tokens_per_second": "{:,.0f}",
    "peak_gb": "{:.1f}",
    "compile_s": "{:.0f}",
    "first_loss": "{:.4f}",
    "large_copies": "{}",
}


def _brief(row: dict[str, Any]) -> str:
    """One line of a row."""
    found = [f"{k}={v}" for k, v in row.items() if k not in ("program", "case")]
    return f"{row['program']} | {row['case']} | {', '.join(found)}"


def _table(rows: Sequence[dict[str, Any]]) -> rich.table.Table:
    """All rows; the columns of numbers that they have."""
    columns = [name for name in _COLUMNS if any(name in row for row in rows)]
    table = rich.table.Table("program", "case", "status", *columns)
    for row in rows:
        cells = [
            _COLUMNS[name].format(row[name]) if row.get(name) is not None else ""
            for name in columns
        ]
        table.add_row(row["program"], row["case"], row["status"], *cells)
    return table


if __name__ == "__main__":
    command_line.run(main)
