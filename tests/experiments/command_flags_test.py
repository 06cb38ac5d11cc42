"""A command takes the flags that it reads, and no others; --help lists these."""

import ast
import re

import pytest
from support import commands

from experiments import command_line

ROOT = commands.ROOT / "experiments"
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in ROOT.rglob("*.py")
    if "    command_line.run(" in path.read_text() and path.name != "command_line.py"
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


def own_flags(tree) -> set[str]:
    """Names that are bound to a flag which the module defines."""
    return {
        node.targets[0].id
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).startswith("flags.DEFINE_")
    }


def called(tree) -> set[str]:
    """Functions that are called, by their last name."""
    return {
        ast.unparse(node.func).rpartition(".")[2]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }


def unread(name) -> list[str]:
    """Flags that a command has and does not read, and those it reads without them."""
    text = commands.source_of(name).read_text()
    tree = ast.parse(text)
    read = read_names(tree)
    loops = re.findall(r"for \w+ in \(?((?:command_line\.[A-Z_]+(?:, )?)+)", text)
    read |= set(re.findall(r"command_line\.[A-Z_]+", " ".join(loops)))
    found = sorted(own_flags(tree) - read)
    shared = {x.rpartition(".")[2].lower() for x in read if "command_line." in x}
    if called(tree) & {"start", "start_devices"}:
        shared |= OF_DEVICES
    taken = commands.taken(name)
    if "config_from_flags" in called(tree):
        shared |= taken & OF_CONFIG
    if "flags_by_module_dict" in called(tree):  # It hands all of them on.
        shared |= taken
    return found + sorted(taken ^ shared)


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


@pytest.mark.parametrize("name", ["plan", "verify", "score", "sparse", "support"])
def test_help_lists_the_flags_of_the_command(name, monkeypatch, capsys):
    outcome = commands.run(name, ["--help"], monkeypatch, capsys)
    listed = set(re.findall(r"^  -+(?:\[no\])?(\w+)", outcome.out, re.MULTILINE))
    shared = listed & (OF_CONFIG | OF_DEVICES)
    assert shared == commands.taken(name)
