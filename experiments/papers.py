r"""Computes figures of published papers, and says whether their claims hold.

    python -m experiments.papers --list
    python -m experiments.papers scaling
    python -m experiments.papers --all --quick

A paper prints a table and its claims, and writes NAME.png and NAME.json to --outputs.
All papers run on simulated CPU devices, so that every machine finds the same. Quick
ones run side by side, in processes of their own. The exit code is 1 if a claim fails.
"""

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence

import rich.progress
import rich.table
from absl import flags

import meshpar
from experiments.gallery import catalog, paper
from meshpar.commands import command_line, outputs
from meshpar.commands.reports import terminal
from meshpar.errors import ConfigError
from meshpar.settings import Number, Path

LIST = flags.DEFINE_bool("list", False, "List the papers and end.")
ALL = flags.DEFINE_bool("all", False, "Compute all papers.")
QUICK = flags.DEFINE_bool("quick", False, "Fewer or smaller cases, and one seed.")
JOBS = flags.DEFINE_integer(
    "jobs", 0, "Papers at once; 0 for up to 4 with --quick, by the cores, and else one."
)
OUTPUTS = flags.DEFINE_string("outputs", "runs/papers", "Folder of pictures and JSON.")
command_line.limit(OUTPUTS, Path())
command_line.limit(JOBS, Number(0, 64, "papers", "0 for up to 4 with --quick"))

_DEVICES = 8
_SEEDS = (0, 1, 2)
_MOST_AT_ONCE = 4


def _list(console: rich.console.Console) -> None:
    table = rich.table.Table("name", "shows", "source")
    for entry in catalog.PAPERS.values():
        table.add_row(entry.name, entry.shows, entry.source)
    console.print(table)


def _chosen(names: Sequence[str]) -> list[paper.Paper]:
    """The papers that the command line names.

    Raises:
      ConfigError: none, unknown names, or names beside --all.
    """
    if ALL.value and names:
        raise ConfigError(f"--all with {' '.join(names)}: give one of the two")
    if not ALL.value and not names:
        raise ConfigError("no paper: give names, --all, or --list to see the names")
    if ALL.value:
        return list(catalog.PAPERS.values())
    return [catalog.get(name) for name in dict.fromkeys(names)]


def _print(
    console: rich.console.Console, entry: paper.Paper, result: paper.Result
) -> None:
    """Prints a table, the claims, and "accepted" or those that fail."""
    table = rich.table.Table(*result.columns, title=f"{entry.title} ({entry.source})")
    for row in result.rows:
        table.add_row(*row)
    claims = rich.table.Table("claim", "paper", "found", "holds")
    for claim in result.claims:
        holds = "yes" if claim.holds else "NO"
        claims.add_row(claim.text, claim.paper or "-", claim.found, holds)
    console.print(table)
    console.print(claims)
    failed = [claim.text for claim in result.claims if not claim.holds]
    verdict = f"FAILED: {'; '.join(failed)}" if failed else "accepted"
    console.print(f"{entry.name}: {verdict}", soft_wrap=True)


def _compute(
    folder: pathlib.Path,
    quick: bool,
    name: str,
    progress: Callable[[str, float], None] = lambda text, share: None,
) -> paper.Result:
    """Computes a paper and writes it; the result can be sent between processes."""
    entry = catalog.get(name)
    setting = paper.Setting(quick, _SEEDS[:1] if quick else _SEEDS, progress)
    result = entry.run(setting)
    paper.write(entry, setting, result, folder)
    return dataclasses.replace(result, draw=None)


def _start_process() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    meshpar.simulate(_DEVICES)


def _at_once(
    names: Sequence[str],
    jobs: int,
    compute: Callable[..., paper.Result],
    bar: rich.progress.Progress,
) -> Iterator[paper.Result]:
    """The results of papers in their order, of which several are computed at once."""
    task = bar.add_task(f"{jobs} at once", total=len(names))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context, _start_process) as pool:
        for result in pool.map(compute, names):
            bar.advance(task)
            yield result


def _one_by_one(
    names: Sequence[str],
    compute: Callable[..., paper.Result],
    bar: rich.progress.Progress,
) -> Iterator[paper.Result]:
    """The results of papers, computed here."""
    task = bar.add_task("", total=len(names))
    for index, name in enumerate(names):

        def progress(
            text: str, share: float, index: int = index, name: str = name
        ) -> None:
            bar.update(task, completed=index + share, description=f"{name}: {text}")

        progress("starts", 0.0)
        yield compute(name, progress)


def main(words: Sequence[str]) -> int:
    """Computes the chosen papers; returns the exit code, 1 if a claim fails."""
    console = terminal.wide_console()
    if LIST.value:
        _list(console)
        return 0
    chosen, folder = _chosen(words[1:]), pathlib.Path(OUTPUTS.value)
    outputs.check_folder(folder, "--outputs")
    command_line.use_cpu()
    meshpar.simulate(_DEVICES)
    failed, names = [], [entry.name for entry in chosen]
    jobs = JOBS.value or (min(_MOST_AT_ONCE, os.cpu_count()) if QUICK.value else 1)
    jobs = min(jobs, len(chosen))
    compute = functools.partial(_compute, folder, QUICK.value)
    with rich.progress.Progress(console=console, transient=True) as bar:
        if jobs > 1:
            results = _at_once(names, jobs, compute, bar)
        else:
            results = _one_by_one(names, compute, bar)
        for entry, result in zip(chosen, results, strict=True):
            _print(bar.console, entry, result)
            picture = folder / f"{entry.name}.png"
            bar.console.print(f"picture: {picture}", soft_wrap=True)
            if not result.accepted:
                failed.append(entry.name)
    if len(chosen) > 1:
        missed = f"; failed: {', '.join(failed)}" if failed else ""
        console.print(f"{len(chosen) - len(failed)} of {len(chosen)} accepted{missed}")
    return 1 if failed else 0


if __name__ == "__main__":
    command_line.run(main, arguments=True)
