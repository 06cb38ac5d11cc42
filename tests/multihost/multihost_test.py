"""Starts of many processes, and their agreement before the first step."""

import contextlib
import json
import socket
import threading
import time

import jax
import pytest

from meshpar.multihost import (
    HUNG,
    MissingError,
    MultihostError,
    ProcessInfo,
    allgather_objects,
    check_fingerprint,
    initialize,
    process_info,
)
from meshpar.multihost.agree import differing_processes
from meshpar.multihost.rendezvous import wait_for_all


def test_flags_win_over_the_launcher(monkeypatch):
    assert process_info() is None
    assert process_info("host:1", 4, 2) == ProcessInfo("host:1", 4, 2)
    monkeypatch.setenv("MESHPAR_COORDINATOR", "here:2")
    with pytest.raises(MultihostError, match="MESHPAR_NUM_PROCESSES"):
        process_info()
    monkeypatch.setenv("MESHPAR_NUM_PROCESSES", "2")
    monkeypatch.setenv("MESHPAR_PROCESS_ID", "1")
    assert process_info() == ProcessInfo("here:2", 2, 1)
    assert process_info("flag:3", 8, 7) == ProcessInfo("flag:3", 8, 7)


SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "gpu[007-010]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "4",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
MPICH = {"PMI_SIZE": "3", "PMI_RANK": "1", "MESHPAR_COORDINATOR": "first:12321"}
JOBSET = {  # As launch/gke_jobset.yaml sets them.
    "MESHPAR_COORDINATOR": "meshpar-workers-0-0.meshpar:1234",
    "MESHPAR_NUM_PROCESSES": "4",
    "MESHPAR_PROCESS_ID": "3",
}


@pytest.mark.parametrize(
    "environment, host, num, process",
    [
        (SLURM, "gpu007", 4, 2),
        (SLURM | {"SLURM_STEP_NODELIST": "a1,a2"}, "a1", 4, 2),
        (OPEN_MPI, "10.96.0.1", 8, 5),
        (OPEN_MPI | {"MESHPAR_COORDINATOR": "first:9"}, "first", 8, 5),
        (MPICH, "first", 3, 1),
        (JOBSET, "meshpar-workers-0-0.meshpar", 4, 3),
    ],
)
def test_clusters_are_found(environment, host, num, process, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    info = process_info()
    assert info.coordinator.rpartition(":")[0] == host
    assert info[1:] == (num, process)


def test_a_single_task_of_a_cluster_is_a_single_process(monkeypatch):
    for name, value in (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}).items():
        monkeypatch.setenv(name, value)
    assert process_info() is None


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def errors_of(processes, timeout_s):
    """{number: error, or ""} of several threads that wait for each other."""
    errors = {}

    def wait(number, process):
        try:
            wait_for_all(process, timeout_s)
            errors[number] = ""
        except MultihostError as error:
            errors[number] = str(error)

    threads = [
        threading.Thread(target=wait, args=pair) for pair in enumerate(processes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return errors


def test_all_processes_arrive_before_jax_starts():
    address = f"localhost:{free_port()}"
    processes = [ProcessInfo(address, 4, rank) for rank in (3, 1, 2, 0)]
    assert errors_of(processes, 20) == {0: "", 1: "", 2: "", 3: ""}


def test_missing_processes_are_named_in_all_that_arrived():
    address = f"localhost:{free_port()}"
    errors = errors_of([ProcessInfo(address, 5, rank) for rank in (0, 2)], 1.5)
    assert MissingError.exit_code == HUNG  # Launchers start the run again.
    for error in errors.values():
        assert "process(es) [1, 3, 4] of 5 did not arrive" in error


def test_a_process_that_connected_and_died_is_missing_until_it_connects_again():
    port = free_port()
    processes = [ProcessInfo(f"localhost:{port}", 3, rank) for rank in range(3)]
    first = threading.Thread(target=wait_for_all, args=(processes[0], 20))
    first.start()
    while True:
        with contextlib.suppress(OSError):
            with socket.create_connection(("localhost", port)) as dying:
                dying.sendall(b'{"process": 1, "num": 3}\n')
            break
    second = threading.Thread(target=wait_for_all, args=(processes[2], 20))
    second.start()
    time.sleep(0.5)
    assert first.is_alive() and second.is_alive()
    wait_for_all(processes[1], 10)
    for thread in (first, second):
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "probe", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\n", b"[]\n", b""]
)
def test_probes_of_health_checks_are_ignored(probe):
    port = free_port()
    processes = [ProcessInfo(f"localhost:{port}", 2, rank) for rank in range(2)]
    errors = {}
    serving = threading.Thread(
        target=lambda: errors.update(errors_of(processes[:1], 20))
    )
    serving.start()
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            with socket.create_connection(("localhost", port)) as connection:
                connection.sendall(probe)
            break
    wait_for_all(processes[1], 10)
    serving.join(20)
    assert errors == {0: ""}


def test_a_coordinator_that_is_missing_is_named():
    errors = errors_of([ProcessInfo(f"localhost:{free_port()}", 2, 1)], 1)
    assert "process 1 cannot reach process 0 at localhost" in errors[0]


@pytest.mark.parametrize(
    "second, words",
    [((3, 1), "two processes have rank 1"), ((4, 2), "expects 4")],
)
def test_processes_that_do_not_fit_together_are_an_error(second, words):
    address = f"localhost:{free_port()}"
    processes = [
        ProcessInfo(address, 3, 0),
        ProcessInfo(address, 3, 1),
        ProcessInfo(address, *second),
    ]
    assert words in errors_of(processes, 10)[0]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("host:1", 0, -1), "give all three or none"),
        (("", 2, 0), "give all three or none"),
        (("host:1", 2, 2), "process_id=2 is not one of num_processes=2"),
    ],
)
def test_incomplete_flags_are_an_error(arguments, words):
    with pytest.raises(MultihostError, match=words):
        process_info(*arguments)


def test_single_process_needs_no_others():
    assert process_info("nowhere:1", 1, 0) is None
    initialize(None)
    check_fingerprint({"a": 1})


def test_the_differing_process_and_field_are_named():
    same = {"seed": "0", "jax": "1"}
    assert differing_processes({p: same for p in range(4)}) == []
    odd = {0: same, 1: same, 2: {**same, "seed": "7"}, 3: same}
    assert differing_processes(odd) == ["seed: process 2 has '7', the others '0'"]
    split = {0: same, 1: {**same, "jax": "2"}}
    assert differing_processes(split) == ["jax: process 0 has '1', process 1 has '2'"]
    lacking = {0: same, 1: same, 2: {"jax": "1"}}
    assert differing_processes(lacking) == [
        "seed: process 2 has 'nothing', the others '0'"
    ]


class OtherProcess:
    """The key-value store of jax.distributed, in which process 1 has set its value."""

    def __init__(self, text):
        self.text, self.values = text, {}

    def key_value_set(self, key, value):
        self.values[key] = value
        if self.text:
            self.values[key.removesuffix("0") + "1"] = self.text

    def blocking_key_value_get(self, key, _):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        return self.values[key]

    def wait_at_barrier(self, *_):
        pass


@pytest.fixture
def other_process(monkeypatch):
    def start(text):
        client = OtherProcess(text)
        monkeypatch.setattr("meshpar.compat.coordination_client", lambda: client)
        monkeypatch.setattr("jax.process_count", lambda: 2)

    return start


def test_objects_are_gathered_from_all_processes(other_process):
    other_process(json.dumps(["seed", [7]]))
    assert allgather_objects("seed", 3) == {0: 3, 1: [7]}


def test_a_process_that_does_not_report_is_named(other_process):
    other_process("")
    with pytest.raises(MissingError, match=r"process\(es\) \[1\] of 2 did not report"):
        allgather_objects("seed", 3, 1)


def test_processes_that_gather_different_objects_have_diverged(other_process):
    other_process(json.dumps(["set aside", "4"]))
    with pytest.raises(MultihostError, match="gathers 'seed'.*{1: 'set aside'}"):
        allgather_objects("seed", 3)
