"""Starts of many processes, and their agreement before the first step."""

import json

import jax
import pytest

from meshpar.multihost import (
    MissingError,
    MultihostError,
    ProcessInfo,
    allgather_objects,
    check_fingerprint,
    initialize,
    process_info,
)
from meshpar.multihost.agree import differing_processes


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
        (
            OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fe80::b9b]:43370"},
            *("[fe80::b9b]", 8, 5),
        ),
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


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("host:1", 0, -1), "give all three or none"),
        (("", 2, 0), "give all three or none"),
        (("host:1", 2, 2), "process_id=2 is not one of num_processes=2"),
        (("host:1", 2, -5), "process_id=-5 is not one of num_processes=2"),
        (("", -3, -1), "give all three or none"),
    ],
)
def test_incomplete_flags_are_an_error(arguments, words):
    with pytest.raises(MultihostError, match=words):
        process_info(*arguments)


BROKEN = {
    "MESHPAR_NUM_PROCESSES=abc": JOBSET | {"MESHPAR_NUM_PROCESSES": "abc"},
    "MESHPAR_NUM_PROCESSES=-2": JOBSET | {"MESHPAR_NUM_PROCESSES": "-2"},
    "MESHPAR_PROCESS_ID=1e9": JOBSET | {"MESHPAR_PROCESS_ID": "1e9"},
    "MESHPAR_PROCESS_ID not set": JOBSET | {"MESHPAR_PROCESS_ID": ""},
    "cannot be read: ValueError": SLURM | {"SLURM_PROCID": "two"},
    "cannot be read: KeyError": {
        name: text for name, text in OPEN_MPI.items() if "RANK" not in name
    },
    "cannot be read: RuntimeError": OPEN_MPI
    | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;usock"},
}


@pytest.mark.parametrize("words, environment", BROKEN.items(), ids=BROKEN)
def test_broken_variables_of_a_cluster_are_named(words, environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MultihostError) as caught:
        process_info()
    name, _, value = words.partition("=")
    assert name in str(caught.value) and value in str(caught.value)


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
