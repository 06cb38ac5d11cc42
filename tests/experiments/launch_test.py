"""Launchers: dry runs, restarts, and files that are well formed."""

import os
import pathlib
import signal
import subprocess
import sys
import sysconfig
import time

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
COMMAND = ["--", "python", "-m", "experiments.run", "--layout=data=2,fsdp=2"]


def run(*words, timeout=60):
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )


@pytest.mark.parametrize(
    "words, says",
    [
        (["local.sh", "--dry_run", "2"], ["2 processes", "MESHPAR_PROCESS_ID=0..1"]),
        (["slurm.sh", "--dry_run"], ["srun --wait=60", "--output=logs/%t"]),
        (
            ["mpirun.sh", "--dry_run", "4", "--hostfile", "h"],
            ["mpirun -n 4 --hostfile"],
        ),
        (
            ["tpu_pod.sh", "--dry_run", "pod", "zone", "v5litepod-64"],
            ["queued-resources create pod", "--worker=all", "jax\\[tpu\\]"],
        ),
        (
            ["tpu_pod.sh", "--dry_run", "pod", "zone"],
            ["tpu-vm ssh pod --worker=all", "pod:meshpar/.token"],
        ),
        (
            ["ray.sh", "--address=10.0.0.1:6379", "--dry_run"],
            ["RAY_ADDRESS=10.0.0.1:6379", "RAY_AUTH_MODE=token"],
        ),
    ],
)
def test_dry_runs_say_what_they_would_do(words, says, tmp_path):
    done = run(f"launch/{words[0]}", *words[1:], *COMMAND)
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in says), done.stdout
    assert "experiments.run" in done.stdout and "fsdp=2" in done.stdout
    assert not (ROOT / "logs" / "progress").exists()


@pytest.mark.parametrize("name", ["local.sh", "slurm.sh", "mpirun.sh", "tpu_pod.sh"])
def test_a_launcher_without_a_command_says_how_to_use_it(name):
    done = run(f"launch/{name}")
    assert done.returncode == 2 and f"launch/{name}" in done.stderr
    assert run(f"launch/{name}", "--max_restarts=x", *COMMAND).returncode == 2


def launch(tmp_path, script, *options, num="2"):
    log_dir = f"--log_dir={tmp_path}/logs"
    options = (*options, "--backoff=0.01")
    command = ["bash", "-c", script.replace("HERE", str(tmp_path))]
    return run("launch/local.sh", log_dir, *options, num, "--", *command)


COUNT = "echo x >>HERE/$MESHPAR_PROCESS_ID; n=$(wc -l <HERE/$MESHPAR_PROCESS_ID); "


def starts(tmp_path, process=0):
    return len((tmp_path / str(process)).read_text().splitlines())


def test_a_process_that_dies_starts_all_again(tmp_path):
    script = COUNT + (
        "echo $((n * 10)) >$MESHPAR_PROGRESS; ((n == 3)) && exit 0; "
        "((MESHPAR_PROCESS_ID)) || exec sleep 30; "
        "until [[ -e HERE/0 ]] && (($(wc -l <HERE/0) == n)); do sleep 0.01; done; "
        "kill -9 $$"
    )
    done = launch(tmp_path, script, "--max_restarts=5")
    assert done.returncode == 0, done.stderr
    assert "process 1 ended with code 137" in done.stderr
    assert "after step 20: restart 2 of 5" in done.stderr
    assert starts(tmp_path) == starts(tmp_path, 1) == 3


def test_the_same_step_failing_twice_ends_it_for_good(tmp_path):
    script = COUNT + (
        "((MESHPAR_PROCESS_ID)) && sleep 30; echo 7 >$MESHPAR_PROGRESS; exit 3"
    )
    done = launch(tmp_path, script, "--max_restarts=5")
    assert done.returncode == 3 and starts(tmp_path) == 2
    assert "ended with code 3 twice after step 7: not started again" in done.stderr


def test_restarts_run_out(tmp_path):
    script = COUNT + (
        "((MESHPAR_PROCESS_ID)) && sleep 30; echo $n >$MESHPAR_PROGRESS; exit 76"
    )
    done = launch(tmp_path, script, "--max_restarts=2")
    assert done.returncode == 76 and starts(tmp_path) == 3
    assert "ended with code 76 after 2 restarts" in done.stderr


@pytest.mark.parametrize("code", [1, 2])
def test_what_would_happen_again_is_not_tried_again(code, tmp_path):
    done = launch(tmp_path, COUNT + f"exit {code}", "--max_restarts=5")
    assert done.returncode == code and starts(tmp_path) == 1
    assert "not started again" in done.stderr


def test_a_preempted_run_starts_again_even_at_the_same_step(tmp_path):
    script = COUNT + "echo 7 >$MESHPAR_PROGRESS; ((n == 4)) && exit 0; exit 75"
    done = launch(tmp_path, script, "--max_restarts=5")
    assert done.returncode == 0 and starts(tmp_path) == 4


def make_command(path, script):
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


FAKES = {
    "srun": 'echo "$MESHPAR_TOKEN" >HERE/token; exec sleep 30',
    "scancel": 'echo "$@" >HERE/scancel; kill $(pgrep -P $PPID -x sleep)',
    "scontrol": 'echo "$@" >HERE/scontrol',
}


def test_slurm_signals_the_tasks_alone(tmp_path, monkeypatch):
    """With stand-ins for SLURM's commands, the script's signals reach scancel."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in FAKES.items():
        make_command(folder / name, script.replace("HERE", str(tmp_path)))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_SUBMIT_DIR", str(ROOT))
    words = ["launch/slurm.sh", f"--log_dir={tmp_path}", "--max_restarts=5", *COMMAND]
    running = subprocess.Popen(words, cwd=ROOT)
    while not (tmp_path / "token").exists():
        assert running.poll() is None
        time.sleep(0.02)
    running.terminate()
    assert running.wait(30) == 128 + signal.SIGTERM
    assert (tmp_path / "scancel").read_text() == "--signal=TERM 4711\n"
    assert not (tmp_path / "scontrol").exists()  # Only a run that saved goes on.
    assert len((tmp_path / "token").read_text()) == 65


def test_a_worker_ends_the_process_that_it_recorded(tmp_path):
    """The commands that tpu_pod.sh sends, with a shell in place of ssh."""
    make_command(
        tmp_path / "gcloud",
        f"cd {tmp_path}; "
        'for w; do [[ "$w" != --command=* ]] || exec bash -c "${w#*=}"; done',
    )
    worker = tmp_path / "meshpar/.venv/bin"
    worker.mkdir(parents=True)
    (tmp_path / "meshpar/.token").write_text("x")
    for name in ("python3", "pip"):  # The install does nothing.
        make_command(worker / name, "")
    path = f"{tmp_path}:{worker}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHON": sys.executable}
    words = [f"{LAUNCH}/tpu_pod.sh", f"--log_dir={tmp_path}/logs", "pod", "zone", "--"]
    script = 'echo "$MESHPAR_TOKEN_FILE"; sleep 30 & trap "exit 75" TERM; wait'
    running = subprocess.Popen(
        [*words, "bash", "-c", script],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert running.stdout.readline() == f"{tmp_path}/meshpar/.token\n"
    running.terminate()
    assert running.wait(30) == 75
    running.communicate()
    # An id that belongs to another process by now is left alone.
    with subprocess.Popen(["sleep", "30"]) as other:
        (tmp_path / "meshpar/.process").write_text(f"{other.pid} 1\n")
        again = subprocess.run([*words, "true"], env=environment, timeout=30)
        assert again.returncode == 0 and other.poll() is None
        other.kill()


def test_scripts_pass_shellcheck():
    shellcheck = f"{sysconfig.get_path('scripts')}/shellcheck"
    done = run(shellcheck, "-x", *map(str, sorted(LAUNCH.glob("*.sh"))))
    assert done.returncode == 0, done.stdout


def test_the_job_set_has_the_shape_of_one():
    made, policy = yaml.safe_load_all((LAUNCH / "gke_jobset.yaml").read_text())
    assert made["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and made["kind"] == "JobSet"
    (job,) = made["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"]
    (container,) = spec["template"]["spec"]["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environment["MESHPAR_NUM_PROCESSES"] == str(spec["completions"])
    host, _, port = environment["MESHPAR_COORDINATOR"].partition(":")
    assert host == f"{made['metadata']['name']}-{job['name']}-0-0.meshpar"
    assert int(port) == container["ports"][0]["containerPort"]
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [1, 2]
    assert policy["kind"] == "NetworkPolicy"
    (pods,) = policy["spec"]["ingress"][0]["from"]
    assert pods["podSelector"] == policy["spec"]["podSelector"]


def test_the_image_installs_as_the_readme_does():
    image = (LAUNCH / "Dockerfile").read_text()
    readme = (ROOT / "README.md").read_text()
    install = 'python3 -m venv .venv && .venv/bin/pip install -q -e ".[experiments]"'
    assert install in image and install in readme
