"""Kills servers and islands in Ray; run as a script, so that Ray ends with it.

python killed_in_ray.py CASE..., with server, aggregates, islands, ahead, lost, birth,
births, zygote, ports or trials_of_islands as cases: prints "CASE done" for each that
went well.
"""

import contextlib
import functools
import os
import pathlib
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
import uuid
from concurrent import futures

import numpy as np
import ray

from meshpar.islands import (
    BSP,
    SSP,
    Islands,
    KeyRange,
    Payload,
    ray_host,
    ray_start,
    updates,
)
from meshpar.islands.host import StoreLostError
from meshpar.islands.messages import Join
from meshpar.islands.ray_client import RayClient
from meshpar.islands.rules import Rules
from meshpar.methods.random_search import island_trials


def rules():
    return Rules(SSP(2), updates.add)


def server():
    """A server is killed; every answered push is counted once."""
    ranges = [KeyRange(f"w/{i}", 1000) for i in range(4)]
    coordinator = ray_host.start_servers(ranges, rules, 2, 2)
    client, names = RayClient("client", coordinator), [r.name for r in ranges]
    client.operate([Join(name, "a", 0) for name in names])
    for clock in range(12):
        for values in client.pull("a", names, clock, {}):
            np.testing.assert_array_equal(values.values, np.full(1000, clock))
        ones = np.ones(1000, np.float32)
        client.push("a", clock, {name: Payload((None, ones)) for name in names})
        if clock == 4:
            pids = ray.get(coordinator.pids.remote())
            os.kill(pids["server 0"], signal.SIGKILL)
    assert "server 0" not in ray.get(coordinator.pids.remote())


def averages():
    return Rules(BSP(), updates.add, aggregate=True)


def aggregates():
    """Replicas get averages of two clients; a server is killed, and none is lost."""
    ranges = [KeyRange(f"w/{i}", 1000) for i in range(4)]
    coordinator = ray_host.start_servers(ranges, averages, 2, 2)
    names = [r.name for r in ranges]
    for worker in "ab":
        joins = [Join(name, worker, 0) for name in names]
        RayClient(f"join {worker}", coordinator).operate(joins)

    def work(worker):
        client = RayClient(worker, coordinator)
        numbers = np.full(1000, 1 + "ab".index(worker), np.float32)
        for clock in range(6):
            for values in client.pull(worker, names, clock, {}):
                np.testing.assert_array_equal(values.values, np.full(1000, 1.5 * clock))
            if (worker, clock) == ("b", 2):
                time.sleep(1.0)  # The push of the other one is gathered.
                pids = ray.get(coordinator.pids.remote())
                os.kill(pids["server 0"], signal.SIGKILL)
            client.push(worker, clock, {n: Payload((None, numbers)) for n in names})

    with futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(work, "ab"))
    assert "server 0" not in ray.get(coordinator.pids.remote())


def program(consistency):
    """Two islands of one device, and a batch of both."""
    import jax
    import optax
    from support import tiny_stack

    import meshpar

    batch, optimizer = tiny_stack.batch(), optax.sgd(0.05)
    mode = Islands(
        2,
        consistency=consistency,
        learning_rate=0.05,
        host="ray",
        servers=2,
        replicas=2,
    )
    one = jax.devices()[:1]
    made = meshpar.lower(
        tiny_stack.model(), optimizer, "data=1", batch, devices=one, mode=mode
    )
    return made, batch


def trained(kills, steps=80):
    """The loss and the seconds of a run in which processes are killed after steps."""
    made, batch = program(SSP(2))
    state, start = made.init(3), time.monotonic()
    for step in range(steps):
        state, _ = made.step(state, batch)
        if step in kills:
            islands, servers = made.host.pids()
            pids = islands if kills[step] == "island" else servers
            os.kill(list(pids.values())[0], signal.SIGKILL)
    made.host.drain()
    portable, extra = made.in_model_order(state), made.extra_state(state)
    assert int(portable.step) == steps and extra["islands"].size
    loss = float(made.evaluate(state, batch)["loss"])
    made.close()
    return loss, time.monotonic() - start


def islands():
    """Two islands and a server are killed; the loss is that of an unbroken run."""
    whole, seconds = trained({})
    kills = {15: "island", 30: "server", 45: "island"}
    broken, broken_seconds = trained(kills)
    print(
        f"loss {whole:.4f} in {seconds:.1f} s, with kills {broken:.4f} in "
        f"{broken_seconds:.1f} s",
        flush=True,
    )
    assert broken < 1.01 * whole + 0.01


def ahead():
    """Nobody waits for an island that is ahead and has to wait for the others."""
    made, batch = program(BSP())
    made.step(made.init(3), batch)
    made.host.drain()
    part = {name: x[: len(made.batch_rows) // 2] for name, x in batch.items()}
    for _ in range(2):  # Then the other island is the only one that may train.
        made.host.step([part])
        made.host.drain()
        assert made.host.snapshot()
    made.close()


def lost():
    """A checkpoint waits for a new server; without any the store is lost."""
    made, batch = program(SSP(2))
    made.step(made.init(3), batch)
    made.host.drain()
    os.kill(min(made.host.pids()[1].items())[1], signal.SIGKILL)
    assert made.host.snapshot()
    for pid in made.host.pids()[1].values():
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(StoreLostError):
        made.host.center()
        raise AssertionError("nobody holds the center")
    made.close()


def killed(host):
    """Kills the process of the first island."""
    os.kill(host.pids()[0][0], signal.SIGKILL)


def birth():
    """An elastic island begins, is killed and resumes as the recurrence says."""
    from support import island_reference

    case = island_reference.CASES["eamsgd 1"]
    island_reference.check_host(case, "ray", killed, 3)


def births():
    """Islands of every algorithm begin, are killed and resume as recurrences say."""
    from support import island_reference

    for name, case in island_reference.CASES.items():
        for synchronous_steps in (0, 3):
            print("births of", name, synchronous_steps, flush=True)
            island_reference.check_host(case, "ray", killed, synchronous_steps)


class Process:
    def pids(self):
        return os.getpid(), os.getppid()

    def random(self):
        return random.random(), uuid.uuid4().hex


def started():
    """An actor in a process of its own, its id and that of its parent."""
    actor = ray.remote(Process).options(num_cpus=0).remote()
    return actor, *ray.get(actor.pids.remote())


def zygote():
    """Workers are forks, before and after one is killed; then the zygote is killed."""
    first, pid, parent = started()
    command = pathlib.Path(f"/proc/{parent}/cmdline").read_text()
    assert "meshpar.islands.zygote" in command, command
    second, other, same = started()
    assert same == parent and other != pid
    drawn = [ray.get(actor.random.remote()) for actor in (first, second)]
    assert drawn[0][0] != drawn[1][0] and drawn[0][1] != drawn[1][1]
    os.kill(pid, signal.SIGKILL)
    third, new, same = started()
    assert same == parent and new not in (pid, other)
    os.kill(parent, signal.SIGKILL)
    assert ray.get(third.pids.remote())[0] == new
    fourth, last, raylet = started()
    assert raylet != parent
    folder = command.rstrip("\0").split("\0")[-1]
    assert pathlib.Path(folder).is_dir(), command
    print("left", folder, other, parent, new, last, raylet, flush=True)


def ports():
    """Ray's sockets take connections to 127.0.0.1, and to no other address."""
    (node,) = ray.nodes()
    found = [node["NodeManagerPort"], node["ObjectManagerPort"]]
    found.append(int(ray.get_runtime_context().gcs_address.rpartition(":")[2]))
    for port in found:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        try:
            # A socket of all interfaces listens on this address, too.
            socket.create_connection(("127.0.0.2", port), timeout=5).close()
        except ConnectionRefusedError:
            continue
        raise AssertionError(f"port {port} of {found} listens on other addresses")


def one_trial(folder, values):
    """A trial that notes each of its runs; one is killed in its first."""
    note = folder / f"{values['x']}-{uuid.uuid4()}"
    note.touch()
    if values["x"] == 3 and len(list(folder.glob("3-*"))) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return values["x"] ** 2, os.getpid()


def trials_of_islands():
    """A process dies in the middle of a trial, which alone is run again."""
    with tempfile.TemporaryDirectory() as folder:
        run = functools.partial(one_trial, pathlib.Path(folder))
        found = island_trials.search(run, {"x": list(range(8))}, workers=3, host="ray")
        runs = [path.name.partition("-")[0] for path in pathlib.Path(folder).iterdir()]
    assert [square for square, _ in found] == [x**2 for x in range(8)]
    assert os.getpid() not in [pid for _, pid in found]
    assert sorted(runs) == [*"01233", *"4567"], runs


def main(*names):
    ray_start.start_ray()
    cases = server, islands, ahead, lost, birth, births, zygote, ports
    cases = *cases, trials_of_islands, aggregates
    by_name = {case.__name__: case for case in cases}
    for name in names:
        try:
            by_name[name]()
        except Exception:
            print(f"{name} failed", traceback.format_exc(), file=sys.stderr, flush=True)
        else:
            print(name, "done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
