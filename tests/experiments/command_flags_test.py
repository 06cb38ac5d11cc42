"""A command takes the flags that it reads, and no others; --help lists these."""

import ast
import re
import subprocess
import sys

import pytest
from support import commands

from experiments.recipes.config import SETTINGS
from meshpar.commands import command_line

ROOT = commands.ROOT / "experiments"
STARTS = re.compile(r"^    (command_line\.run\(|\w+\.start\(CATALOG)", re.MULTILINE)
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in ROOT.rglob("*.py")
    if re.search(
        r"^    (command_line\.run\(|\w+\.start\(CATALOG)", path.read_text(), re.M
    )
)
OF_CONFIG = {flag.name for flag in command_line.OF_CONFIG}
OF_DEVICES = {flag.name for flag in command_line.OF_DEVICES}


def read_names(tree) -> set[str]:
    """The names that are read as `NAME.value`, `NAME.present` or `NAME.serialize()`."""
    return {
        ast.unparse(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("value", "present", "serialize")
    }


def unread_own_flags(tree) -> set[str]:
    """Flags of the module that it defines, and at most limits."""
    names = {
        node.targets[0].id
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).startswith("flags.DEFINE_")
    }
    limited = [
        call.args[0]
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "command_line.limit"
    ]
    used = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Load)
        and node not in limited
    }
    return names - used


def called(tree) -> set[str]:
    """Functions that are called, by their last name."""
    return {
        ast.unparse(node.func).rpartition(".")[2]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }


def unread(name) -> list[str]:
    """Flags that a command has and does not read, and those it reads without them."""
    text = commands.code_of(name).read_text()
    tree = ast.parse(text)
    read = read_names(tree)
    loops = re.findall(r"for \w+ in \(?((?:command_line\.[A-Z_]+(?:, )?)+)", text)
    read |= set(re.findall(r"command_line\.[A-Z_]+", " ".join(loops)))
    shared = {x.rpartition(".")[2].lower() for x in read if "command_line." in x}
    if "from meshpar.commands.devices import" in text:
        shared |= OF_DEVICES
    taken = commands.taken(name)
    if "config_from_flags" in called(tree):
        shared |= taken & OF_CONFIG
    if "flags_by_module_dict" in called(tree):  # It hands all of them on.
        shared |= taken
    return sorted(unread_own_flags(tree)) + sorted(taken ^ shared)


def test_there_are_many_commands():
    assert {"run", "verify", "plan", "benchmarks.store", "sparse"} <= set(COMMANDS)
    assert len(COMMANDS) > 25


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_reads_the_flags_that_it_takes(name):
    assert unread(name) == []


SAMPLE = """
NUMBER = flags.DEFINE_integer("number", 3, "Help.")
WORD = flags.DEFINE_string("word", "", "Help.")
command_line.limit(NUMBER, Number(1, 3))


def main(_):
    return WORD.value, command_line.SEED.value


command_line.run(main, (command_line.DATA, *command_line.OF_DEVICES))
"""


def test_flags_that_are_not_read_are_found(tmp_path, monkeypatch):
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "sample.py").write_text(SAMPLE)
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    assert unread("sample") == ["NUMBER", *sorted({"data", "seed"} | OF_DEVICES)]


IMPORTS = """
from absl import flags
from meshpar.commands import command_line

another = dict(module_name="experiments.another")
TAKEN = flags.DEFINE_string("taken", "", "Help.", **another)
flags.DEFINE_string("left", "", "Help.", **another)
flags.declare_key_flag("taken")

def main(_):
    print("took", TAKEN.value)
    return 0

command_line.run(main)
"""


def test_of_other_commands_only_declared_flags_are_taken(tmp_path, monkeypatch, capsys):
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "sample.py").write_text(IMPORTS)
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    done = commands.run("sample", ["--taken=it"], monkeypatch, capsys)
    assert done.code == 0 and "took it" in done.out
    done = commands.run("sample", ["--left=it"], monkeypatch, capsys)
    assert done.code == 2 and "--left is not read by this command" in done.err


def test_help_lists_the_flags_of_the_command():
    words = [sys.executable, "-m", "experiments.plan", "--help"]
    done = subprocess.run(words, cwd=commands.ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    listed = set(re.findall(r"^  -+(?:\[no\])?(\w+)", done.stdout, re.MULTILINE))
    assert listed & (OF_CONFIG | OF_DEVICES) == commands.taken("plan")
    assert {"require", "topology"} <= listed


def test_settings_are_listed_with_their_values_and_meanings(monkeypatch, capsys):
    words = "--recipe=tiny", "--set=model.depth=7", "--steps=9", "--list_settings"
    done = commands.run("run", words, monkeypatch, capsys)
    assert done.code == 0 and done.compilations == 0, done.err
    rows = {
        key.strip(): cells
        for key, *cells in re.findall(r"^│(.+?)│(.+?)│(.+?)│(.+?)│$", done.out, re.M)
    }
    assert SETTINGS.keys() <= rows.keys()
    value, meaning, values = (cell.strip() for cell in rows["model.depth"])
    assert (value, meaning) == ("7", "number of layers.")
    assert values.startswith("a whole number of layers, at least 1")
    assert rows["steps"][0].strip() == "9"
