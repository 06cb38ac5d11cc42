"""Records a short run in a terminal as an animated picture, docs/recording.svg.

    python -m docs.make_recording

It starts the command in a pseudo terminal, notes when each line comes, and writes the
lines as text that appears at these times, some times faster; a program that does not
animate shows the last frame. Needs the extra `experiments`, and takes a minute on two
cores.
"""

import html
import os
import pathlib
import pty
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
COMMAND = (
    "python -m experiments.run --recipe=tiny --steps=100 "
    "--layout=data=2,fsdp=2,tensor=2"
)
COLUMNS, ROW, LETTER = 108, 17, 7.3
SECONDS = 12.0
"""How long the picture runs, whatever the command took."""
MOST = 25
"""Most lines of the picture; those in the middle are left out."""

_STYLE = (
    "text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #e2e6ea; "
    "white-space: pre } .prompt { fill: #57c272 } .note { fill: #9da7b1 }"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LOGGED = re.compile(r"[IWE]\d{4} |WARNING: |\[Gloo\]")
"""The start of a line that a library of jax logs."""


def record(command: list[str]) -> list[tuple[float, str]]:
    """Runs a command in a pseudo terminal; returns (seconds, line) of its output."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "PYTHONPATH": str(ROOT)}
    environment["JAX_PLATFORMS"] = "cpu"
    lines, rest, start = [], "", time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        options = dict(stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder)
        process = subprocess.Popen(command, env=environment, **options)
        os.close(theirs)
        while text := _read(ours):
            *whole, rest = (rest + text).split("\n")
            now = time.monotonic() - start
            lines += [(now, line.rstrip("\r").split("\r")[-1]) for line in whole]
        if process.wait():
            raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    plain = [(when, _ESCAPES.sub("", line)) for when, line in lines]
    return [(when, line) for when, line in plain if not _LOGGED.match(line)]


def _read(terminal: int) -> str:
    try:
        return os.read(terminal, 4096).decode(errors="replace")
    except OSError:  # The command has closed its end.
        return ""


def wrapped(lines: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """The lines as a terminal of COLUMNS shows them."""
    return [
        (when, line[at : at + COLUMNS])
        for when, line in lines
        for at in range(0, max(1, len(line)), COLUMNS)
    ]


def shortened(
    lines: list[tuple[float, str]], most: int = MOST - 2
) -> list[tuple[float, str]]:
    """The first and the last lines, with dots for those in the middle."""
    if len(lines) <= most:
        return lines
    first, last = (most - 1) // 2, most // 2
    return [*lines[:first], (lines[first][0], "..."), *lines[-last:]]


def svg(lines: list[tuple[float, str]]) -> str:
    """The animated picture; it ends with all lines shown, and asks for no font.

    Every line is there from the start, and hidden until its time.
    """
    start, last = (pick(when for when, _ in lines) for pick in (min, max))
    start = min(start, last / 2)  # The wait for the first line is cut.
    rate = SECONDS / (last - start)
    rows = [(0.0, "prompt", f"$ {COMMAND}")]
    rows += [
        ((when - start) * rate, "", line) for when, line in shortened(wrapped(lines))
    ]
    rows.append((SECONDS, "note", f"{last:.0f} seconds, shown in {SECONDS:.0f}"))
    hide = '<set attributeName="opacity" to="0" begin="0s" dur="{:.2f}s"/>'
    texts = "".join(
        f'<text x="12" y="{24 + ROW * number}" class="{kind}">'
        f"{html.escape(line)}{hide.format(when) if when >= 0.01 else ''}</text>"
        for number, (when, kind, line) in enumerate(rows)
    )
    size = f'width="{COLUMNS * LETTER + 24:.0f}" height="{24 + ROW * len(rows)}"'
    box = f"0 0 {COLUMNS * LETTER + 24:.0f} {24 + ROW * len(rows)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" {size}>'
        f"<style>{_STYLE}</style>"
        f'<rect {size} rx="6" fill="#16191d"/>{texts}</svg>\n'
    )


def main() -> None:
    """Writes the picture beside this file."""
    lines = record([sys.executable, *COMMAND.split()[1:]])
    (ROOT / "docs/recording.svg").write_text(svg(lines))


if __name__ == "__main__":
    main()
