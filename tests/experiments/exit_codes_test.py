"""Exit codes of commands: what the user can mend, what may pass, what would not."""

import errno
import pathlib

import jax
import pytest
from support import commands

from experiments.supervision.restarts import Restarts
from meshpar.commands import command_line

ROOT = pathlib.Path(__file__).parents[2]
PLACE = {
    "MESHPAR_COORDINATOR": "localhost:9",
    "MESHPAR_NUM_PROCESSES": "2",
    "MESHPAR_PROCESS_ID": "0",
    "MESHPAR_TOKEN": "a token of the tests alone",
}


@pytest.mark.parametrize(
    "flag, environment, says",
    [
        ("--start_timeot=3", {}, "Unknown command line flag 'start_timeot'"),
        ("--start_timeout=nan", PLACE, "timeout=nan"),
        ("--seed=0", PLACE | {"MESHPAR_NUM_PROCESSES": "abc"}, "PROCESSES='abc'"),
    ],
)
def test_what_the_user_can_mend_ends_with_2_and_no_traceback(
    flag, environment, says, tmp_path, monkeypatch, capsys
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    words = [flag, f"--workdir={tmp_path}/run"]
    done = commands.run("run", words, monkeypatch, capsys)
    assert done.code == 2, done.err
    assert says in done.err and "error: " in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "error, many, code",
    [
        (OSError(errno.ENOSPC, "full"), False, 2),
        (OSError(errno.ESTALE, "the server of the folder is away"), False, 76),
        (jax.errors.JaxRuntimeError("INTERNAL: connection reset"), True, 76),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory"), True, 2),
        (KeyError("a bug"), True, 1),
    ],
)
def test_what_may_pass_is_tried_again(error, many, code, monkeypatch, capsys):
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: many)
    assert command_line._report(error) == code
    assert (Restarts(1, 0.0).pause(code, None) is None) == (code != 76)
    assert str(error) in capsys.readouterr().err


def test_a_bug_in_a_single_process_is_raised():
    with pytest.raises(KeyError):
        command_line._report(KeyError("a bug"))
