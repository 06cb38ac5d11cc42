"""Islands in Ray against plain loops; run as a script, so that Ray ends with it."""

import dataclasses

import jax
import numpy as np
import ray
from support import chosen_pushes
from support.chosen_pushes import OWNERS, SGD, Without, largest, loop, without
from support.island_reference import batch, given

from meshpar.islands import ray_start

STEPS = 5


@ray.remote(num_cpus=0)
def watch(reader, last):
    """Reads the newest version of running islands until they reach the last one."""
    found = []
    while not found or found[-1][0] < last:
        found.append(reader.pull_version())
    return found


def owners():
    """Islands own data and have a budget; another process reads whole versions."""
    mode = dataclasses.replace(OWNERS, host="ray", history=STEPS)
    program = chosen_pushes.lowered(mode)
    state, store, seen = program.init(0, given()), {}, None
    for step, wanted in enumerate(loop(STEPS, largest, workers=2)):
        state, metrics = program.step(state, batch(step))
        program.host.drain()
        store[step + 2] = program.host.center()
        np.testing.assert_allclose(
            store[step + 2].reshape(4, 4), wanted, rtol=0, atol=1e-6
        )
        if seen is None:
            seen = watch.remote(program.reader(), STEPS + 1)
    assert metrics["pushed_bytes"] <= 2 * mode.budget
    found = ray.get(seen)
    found += [program.reader().pull_version(version) for version in store]
    for version, arrays in found:
        np.testing.assert_array_equal(arrays["own"].ravel(), store[version])
    print("read", [version for version, _ in found], flush=True)
    program.close()


def filters():
    """Islands send what a user's filter leaves; the rest waits, also in checkpoints."""
    mode = dataclasses.replace(SGD, host="ray", filters=(Without(every=2),))
    program = chosen_pushes.lowered(mode)
    chosen_pushes.check(program, loop(4, without(2)), resumes_at=3).close()


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    ray_start.start_ray()
    for case in owners, filters:
        case()
        print(case.__name__, "done", flush=True)
