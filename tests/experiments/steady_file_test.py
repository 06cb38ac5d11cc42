"""Files that change while they are read: an error that names them, or the old bytes."""

import os
import time

import numpy as np
import pytest
from support.marks import slow

from experiments import data
from experiments.data import DataConfig
from experiments.data.steady_file import SteadyFile, read_whole
from meshpar.errors import DataError

TOKENS = np.random.default_rng(0).integers(0, 250, 40_000)
OTHERS = np.random.default_rng(1).integers(0, 250, 40_000)
PLACE = dict(length=16, batch_size=8, seed=0, rows=range(8))


@pytest.fixture(params=[slow("ids.bin"), "ids.npy"])
def file(tmp_path, request):
    path = tmp_path / request.param
    write(path, TOKENS)
    return path


def write(path, tokens):
    """Writes token ids into a file, in place if it exists."""
    with open(path, "r+b" if path.exists() else "wb") as opened:
        if path.suffix == ".npy":
            np.save(opened, tokens.astype("<u2"))
        else:
            opened.write(tokens.astype("<u2").tobytes())


def batches(file, position=0):
    corpus = data.load(DataConfig(path=str(file)))
    return data.training_batches(corpus, position=position, **PLACE)


def taken(batches, number):
    return np.stack([next(batches)["tokens"] for _ in range(number)])


def cut(path):
    os.truncate(path, 5000)


def grow(path):
    with path.open("ab") as opened:
        opened.write(b"more")


def other_data(path):
    write(path, OTHERS)


def other_data_of_the_same_time(path):
    """As `cp --preserve=timestamps` writes other data in place."""
    before = path.stat()
    write(path, OTHERS)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "change, words",
    [
        (cut, "was cut or grew.* 5,000 bytes.*seen at the tokens.*restore the file"),
        (grow, "was cut or grew.*restore the file"),
        (other_data, "was written to while it was read.*start anew"),
        (other_data_of_the_same_time, "was written to while it was read"),
    ],
)
def test_a_token_file_that_changes_is_an_error_and_never_other_data(
    file, change, words
):
    found, want = batches(file), taken(batches(file), 200)
    np.testing.assert_array_equal(taken(found, 20), want[:20])
    time.sleep(0.01)  # The clock of files is coarser than that of the processor.
    change(file)
    with pytest.raises(DataError, match=f"{file.name} {words}"):
        for row in want[20:]:  # Those that were read ahead are as they were.
            np.testing.assert_array_equal(next(found)["tokens"], row)


def removed(path):
    path.unlink()


def replaced(path):
    new = path.with_name(f"new{path.suffix}")
    write(new, OTHERS)
    os.replace(new, path)


@pytest.mark.parametrize("change", [removed, replaced])
def test_a_name_that_goes_is_said_and_the_opened_file_is_read_on(file, change, caplog):
    found, want = batches(file), taken(batches(file), 100)
    taken(found, 20)
    change(file)
    np.testing.assert_array_equal(taken(found, 80), want[20:])
    warnings = [x.getMessage() for x in caplog.records if str(file) in x.getMessage()]
    assert len(warnings) == 1 and "replaced or removed" in warnings[0]


def test_other_permissions_change_nothing_and_say_nothing(file, caplog):
    found, want = batches(file), taken(batches(file), 100)
    taken(found, 20)
    file.chmod(0)
    np.testing.assert_array_equal(taken(found, 80), want[20:])
    assert not caplog.records


def test_a_slow_disk_is_waited_for_and_a_broken_one_is_named(file, monkeypatch):
    read, want = os.pread, taken(batches(file), 3)

    def slowly(*where):
        time.sleep(0.01)
        return read(*where)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", slowly)
        np.testing.assert_array_equal(taken(batches(file), 3), want)
    steady = SteadyFile(file)

    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(OSError, match=file.name) as caught:
        steady.read(0, 10, "a part")
    assert caught.value.errno == 5  # Commands end with 76, and are started again.


def test_short_reads_are_put_together(file, monkeypatch):
    read, want = os.pread, SteadyFile(file).read(3, 5000, "a part")
    monkeypatch.setattr(os, "pread", lambda where, n, at: read(where, min(n, 7), at))
    assert SteadyFile(file).read(3, 5000, "a part") == want


@pytest.mark.parametrize("change", [cut, grow, other_data, removed, replaced])
def test_a_file_that_changes_while_it_is_read_whole_is_an_error(tmp_path, change):
    path = tmp_path / "text.bin"
    write(path, TOKENS)
    with pytest.raises((DataError, FileNotFoundError), match=path.name):
        with read_whole(path):
            time.sleep(0.01)
            change(path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_a_text_that_is_cut_while_it_is_read_is_an_error(tmp_path, name, monkeypatch):
    path = tmp_path / name
    path.write_text('{"text": "one"}\n' * 9 if name == "a.jsonl" else "text\none\n" * 9)
    os.utime(path, (0, 0))
    status = type(path).stat

    def cut_after_the_first_look(self, **how):
        found = status(self, **how)
        if self == path and found.st_size > 64 and found.st_mtime == 0:
            os.truncate(path, 64)  # At the end of a row.
        return found

    read_before = data.files.find_files

    def found_files(given):
        files = read_before(given)
        monkeypatch.setattr(type(path), "stat", cut_after_the_first_look)
        return files

    monkeypatch.setattr(data.corpus, "find_files", found_files)
    with pytest.raises(DataError, match=f"{name} changed while it was read; wait"):
        data.load(DataConfig(path=str(path)))


def test_one_byte_that_is_written_anew_is_seen_wherever_it_is(tmp_path):
    path = tmp_path / "large.bin"
    path.write_bytes(bytes(2**21))
    steady = SteadyFile(path)
    time.sleep(0.01)
    with path.open("r+b") as opened:
        opened.seek(10_000)  # Between the parts that are hashed.
        opened.write(b"x")
    with pytest.raises(DataError, match="was written to while it was read"):
        steady.read(0, 10, "its beginning")
