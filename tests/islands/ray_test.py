"""Real processes: servers and islands in Ray, killed in mid-run."""
# ruff: noqa: E402

import dataclasses
import os
import signal

import numpy as np
import pytest

ray = pytest.importorskip("ray", reason='needs pip install -e ".[islands]"')

from meshpar.islands import SSP, KeyRange, Payload, ray_host, updates
from meshpar.islands.messages import Join
from meshpar.islands.ray_client import RayClient
from meshpar.islands.rules import Rules

RANGES = [KeyRange(f"w/{i}", 1000) for i in range(4)]


@pytest.fixture(scope="module")
def cluster():
    ray_host.start_ray()
    yield
    ray.shutdown()


def rules():
    return Rules(SSP(2), updates.add)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_server_is_killed_and_no_answered_push_is_lost(cluster):
    coordinator = ray_host.start_servers(RANGES, rules, 2, 2)
    client, names = RayClient("client", coordinator), [r.name for r in RANGES]
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
    ray.kill(coordinator)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_islands_and_servers_are_killed_and_training_goes_on(cluster):
    import jax
    import optax
    from support import tiny_stack

    import meshpar
    from meshpar.islands import Islands

    mode = Islands(
        2, consistency=SSP(2), learning_rate=0.05, host="ray", servers=2, replicas=2
    )
    batch = tiny_stack.batch()

    def run(kills):
        made = meshpar.lower(
            *(tiny_stack.model(), optax.sgd(0.05), "fsdp=2", batch),
            devices=jax.devices()[:2],
            mode=dataclasses.replace(mode),
        )
        state = made.init(3)
        for step in range(200):
            state, _ = made.step(state, batch)
            if step in kills:
                islands, servers = made.host.pids()
                pids = islands if kills[step] == "island" else servers
                os.kill(list(pids.values())[0], signal.SIGKILL)
        made.host.drain()
        loss = made.evaluate(state, batch)["loss"]
        made.close()
        return loss

    whole, broken = run({}), run({40: "island", 80: "server", 120: "island"})
    assert broken < 1.01 * whole + 0.02
