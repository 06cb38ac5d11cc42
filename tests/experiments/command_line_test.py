"""How commands end, and texts of users in what they print."""

import contextlib
import dataclasses
import errno
import re

import pytest
from absl import app, flags
from support import bad_input, commands, tiny_models

from meshpar.commands import command_line, outputs
from meshpar.commands.reports import explanation, page
from meshpar.errors import ConfigError
from meshpar.explain.report import explain


@pytest.fixture
def ended(monkeypatch, capsys):
    """Runs a function as a command; returns its exit code and what stderr shows."""

    def ended(main, *words):
        monkeypatch.setattr(app._run_init, "done", True)
        monkeypatch.setattr("sys.argv", ["command", *words])
        with commands.flags_anew(), pytest.raises(SystemExit) as end:
            command_line.run(main)
        return end.value.code, capsys.readouterr().err

    return ended


@pytest.mark.parametrize(
    "error, remedy",
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "make room and run the same",
        ),
        (OSError(errno.EDQUOT, "Quota exceeded"), "make room"),
        (PermissionError(errno.EACCES, "Permission denied", "/a"), "choose a path"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "a"), "choose a path"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "/"), "choose a path"),
        (OSError(errno.EFBIG, "File too large", "/a"), "make room and run the same"),
        (
            OSError(errno.EROFS, "Read-only file system", "/a"),
            "mount the disk for writing and run the same command again",
        ),
        (MemoryError("cannot allocate 8 TiB"), "use a smaller model"),
        (RuntimeError("RESOURCE_EXHAUSTED: out of memory"), "use a smaller model"),
        (ConfigError("x=1: use 2"), "x=1: use 2"),
    ],
    ids=str,
)
def test_what_a_user_can_mend_ends_with_the_remedy(error, remedy, ended):
    def main(_):
        raise error

    code, said = ended(main)
    assert code == 2
    assert said.startswith("error: ") and remedy in said, said
    assert str(error) in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("error", [KeyError("x"), OSError(errno.ENOEXEC, "bad")])
def test_a_crash_stays_a_crash(error, monkeypatch):
    def main(_):
        raise error

    monkeypatch.setattr(app._run_init, "done", True)
    monkeypatch.setattr("sys.argv", ["command"])
    with commands.flags_anew(), pytest.raises(type(error)):
        command_line.run(main)


def test_an_error_keeps_its_exit_code_where_it_cannot_be_printed(monkeypatch, ended):
    def main(_):
        raise ConfigError("x=1: use 2")

    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stderr", full)
        assert ended(main)[0] == 2
        with contextlib.suppress(OSError):
            full.close()


def test_flags_of_other_commands_come_back(ended):
    """Commands that follow each other in this process keep their own flags."""
    with commands.flags_anew():
        kept = flags.DEFINE_integer("kept", 1, "help", module_name="experiments.other")
        assert ended(lambda _: 0) == (0, "")
        assert kept.value == 1
        assert ended(lambda _: 0)[0] == 0
        code, said = ended(lambda _: 0, "--kept=2")
        assert code == 2 and "Unknown command line flag 'kept'" in said


def test_files_and_folders_are_tried_and_not_touched(tmp_path):
    (tmp_path / "file").write_text("text")
    outputs.check_file(f"{tmp_path}/file", "--html")
    outputs.check_file(f"{tmp_path}/new", "--html")
    outputs.check_folder(f"{tmp_path}/a/b/c", "--to")
    outputs.check_folder(tmp_path, "--to")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "text"
    for path in ("file/x", "x/y", "", "a" * 256):
        with pytest.raises(ConfigError, match="--html=.*cannot be written"):
            outputs.check_file(f"{tmp_path}/{path}", "--html")
    with pytest.raises(ConfigError, match="--to=.*choose another folder"):
        outputs.check_folder(f"{tmp_path}/file/x", "--to")


def test_checkpoints_list_layouts_as_they_are(tmp_path, monkeypatch, capsys):
    """A layout may look like markup."""
    bad_input.make_checkpoints(tmp_path)
    run = commands.run("checkpoint", [f"{tmp_path}/run"], monkeypatch, capsys)
    assert run.code == 0
    assert "data=2,waive=[/a]" in run.out and "[red]" in run.out


def test_explanations_show_layouts_as_they_are(tmp_path, capsys):
    """A layout may look like markup, or like a formula in its pictures."""
    layout = 'data=1,allow="[/a]$",allow="^x_{$"'
    explained = explain(tiny_models.lower("data=1"))
    explained = dataclasses.replace(explained, layout=layout)
    explanation.print_explanations([explained], parameters=True)
    said = re.sub(r"\s", "", capsys.readouterr().out)
    assert '"[/a]$"' in said and '"^x_{$"' in said
    page.write(f"{tmp_path}/page.html", "tiny", [explained], "plan")
    assert (tmp_path / "page.html").read_text().count("<svg") == 3
