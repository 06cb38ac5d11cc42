"""Commands in this process, as a shell would start them: flags, exit code, output.

A command is run as `__main__`, with flags of its own, so that commands whose flags have
equal names can follow each other in one process.
"""

import ast
import contextlib
import dataclasses
import pathlib
import runpy
import sys
import time

import grain  # noqa: F401  It defines its flags once: not inside a command.
import jax
from absl import app, flags
from absl.testing import flagsaver

from meshpar import compat
from meshpar.commands import command_line

ROOT = pathlib.Path(__file__).parents[2]

_compilations: list[str] = []


def _listen(event: str, duration: float, **_) -> None:
    if "backend_compile" in event:
        _compilations.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)


def num_compilations() -> int:
    """The number of programs that this process has compiled so far."""
    return len(_compilations)


@dataclasses.dataclass
class Outcome:
    """The results that a command left behind."""

    code: int
    out: str
    err: str
    compilations: int
    seconds: float


@contextlib.contextmanager
def flags_anew():
    """Sets flags of imported commands aside, and takes away those defined inside."""
    defined = flags.FLAGS.flags_by_module_dict()
    shared_flags = list(defined[command_line.__name__])
    shared = {flag.name for flag in shared_flags}
    aside = [
        (module, flag)
        for module, own in defined.items()
        for flag in own
        if module.startswith(("experiments.", "meshpar.")) and flag.name not in shared
    ]
    for _, flag in aside:
        delattr(flags.FLAGS, flag.name)
    imported = {name: _forget(name) for name in _modules_of_flags()}
    try:
        with flagsaver.flagsaver():
            yield
    finally:
        for name in _modules_of_flags():
            _forget(name)
        sys.modules.update(imported)
        gone = [flag for flag in shared_flags if flag.name not in flags.FLAGS]
        aside += [(command_line.__name__, flag) for flag in gone]
        for module, flag in aside:
            flags.FLAGS[flag.name] = flag
            flags.FLAGS.register_flag_by_module(module, flag)


def _modules_of_flags() -> list[str]:
    """Imported modules that define the flags of a command."""
    files = (ROOT / "meshpar" / "commands").glob("*.py")
    names = {f"meshpar.commands.{file.stem}" for file in files}
    names |= {
        x for x in flags.FLAGS.flags_by_module_dict() if x.startswith("experiments.")
    }
    return sorted(names.intersection(sys.modules) - {command_line.__name__})


def _forget(name):
    """Takes an imported module away, so that it is imported anew; returns it."""
    package, _, stem = name.rpartition(".")
    vars(sys.modules[package]).pop(stem, None)
    return sys.modules.pop(name)


def source_of(name) -> pathlib.Path:
    """The file of `experiments.NAME`."""
    return ROOT / "experiments" / f"{name.replace('.', '/')}.py"


def code_of(name) -> pathlib.Path:
    """The file that defines the flags of `experiments.NAME` and reads them."""
    source = source_of(name)
    if f"{name}.start(CATALOG)" in source.read_text():
        return ROOT / "meshpar" / "commands" / f"{name}.py"
    return source


def taken(name) -> set[str]:
    """Names of the shared flags that `experiments.NAME` takes, read in its source."""
    tree, known = ast.parse(code_of(name).read_text()), {"command_line": command_line}
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TAKES":
            known["TAKES"] = eval(ast.unparse(node.value), dict(known))
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "command_line.run":
            given = [x.value for x in call.keywords if x.arg == "takes"]
            names = [ast.unparse(takes) for takes in [*call.args[1:], *given]]
            found = eval(names[0], known) if names else ()
            return {flag.name for flag in found}
    raise AssertionError(f"experiments.{name} is no command")


def run(name, words, monkeypatch, capsys) -> Outcome:
    """Runs `python -m experiments.NAME WORDS` in this process, on its devices."""
    monkeypatch.setattr(compat, "backends_started", lambda: False)
    monkeypatch.setattr(compat, "prepare_cpu_threads", lambda: None)
    monkeypatch.setattr(compat, "set_simulated_devices", lambda count: None)
    monkeypatch.setattr(app._run_init, "done", True)
    monkeypatch.setattr(sys, "argv", [name, *words])
    capsys.readouterr()
    before, start, code = num_compilations(), time.process_time(), 0
    with flags_anew():
        try:
            runpy.run_path(str(source_of(name)), run_name="__main__")
        except SystemExit as end:
            code = end.code
    seconds = time.process_time() - start
    said = capsys.readouterr()
    compilations = num_compilations() - before
    return Outcome(code, said.out, said.err, compilations, seconds)
