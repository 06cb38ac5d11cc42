"""Metrics of a run: every row is kept, whatever stands in the way of their files."""

import resource
import threading

import matplotlib
import pytest
from tensorboardX.proto.event_pb2 import Event

from meshpar.errors import CheckpointError
from meshpar.runs import metrics


@pytest.mark.parametrize(
    "tail", [b"\xff\xfe\xe9", b'{"loss": 1.0}\n', b"1\n", b'{"step": 3, "lo', b"[\n"]
)
def test_metrics_go_on_after_lines_that_are_no_rows(tail, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 5.0}\n{"step": 2, "loss": 4.0}\n' + tail)
    for step, loss in ((1, 3.5), (2, 3.0)):
        log = metrics.MetricsLog(tmp_path, step)
        log.write(step + 1, loss=loss)
        log.close()
    rows = [(row["step"], row["loss"]) for row in metrics.read(path)]
    assert rows == [(1, 5.0), (2, 3.5), (3, 3.0)]
    assert path.read_bytes().count(b'"step": 2, "loss"') == 2  # None is deleted.


@pytest.mark.parametrize("name", ["tensorboard", "metrics.jsonl"])
def test_something_else_in_the_place_of_the_metrics_is_an_error(name, tmp_path):
    path = tmp_path / name
    path.write_text("") if name == "tensorboard" else path.mkdir()
    with pytest.raises(CheckpointError, match=f"{name}.*move that file away"):
        metrics.MetricsLog(tmp_path, 0)


def test_a_plot_keeps_the_backend_of_a_notebook(tmp_path, monkeypatch):
    monkeypatch.setitem(matplotlib.rcParams, "backend", "svg")
    metrics.plot([{"step": 1, "loss": 2.0}], tmp_path / "loss.png", ("random", 3.0))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert matplotlib.rcParams["backend"] == "svg"


def events(file):
    """The events in a file of TensorBoard: length, checksum, event, checksum."""
    data = file.read_bytes()
    while data:
        size = int.from_bytes(data[:8], "little")
        yield Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]


def test_tensorboard_gets_a_copy_of_all_rows_and_hides_superseded_ones(tmp_path):
    for start in (0, 1):
        log = metrics.MetricsLog(tmp_path, start, ["batch_size: 8 -> 16"][:start])
        log.write(start + 1, loss=0.5, speed=2.0)
        log.close()
    first, second = (
        list(events(f)) for f in sorted((tmp_path / "tensorboard").iterdir())
    )
    assert first[0].file_version == second[0].file_version == "brain.Event:2"
    scalars = [(e.step, v.tag, v.simple_value) for e in first for v in e.summary.value]
    assert scalars == [(1, "loss", 0.5), (1, "speed", 2.0)]
    assert [e.step for e in second if e.HasField("session_log")] == [2]
    tags = [value.tag for event in second for value in event.summary.value]
    assert tags == ["changes/text_summary", "loss", "speed"]


@pytest.fixture
def small_files():
    """Lets no file of this process grow beyond 12 KB, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_the_tensorboard_files_but_not_the_run(tmp_path, small_files):
    """The files of TensorBoard are larger than those of the metrics."""
    log = metrics.MetricsLog(tmp_path, 0)
    write = threading.Thread(
        target=lambda: [log.write(n, a=1.0, b=2.0, c=3.0) for n in range(1, 151)],
        daemon=True,
    )
    write.start()
    write.join(20)
    assert not write.is_alive()
    log.close()
    assert len(metrics.read(tmp_path / "metrics.jsonl")) == 150
    (written,) = (tmp_path / "tensorboard").iterdir()
    assert written.stat().st_size == 12_000
