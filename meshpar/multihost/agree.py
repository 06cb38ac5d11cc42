"""Agreement of processes: all-gather of objects, and comparison of their programs.

Processes that have joined each other compare what they are about to run
(`check_fingerprint`), before any collective.
"""

import collections
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar import compat
from meshpar.multihost.process import MissingError, MultihostError

_calls = itertools.count()

READ_S = 3600.0
"""How long to wait for others that read from their disks, in seconds."""


def allgather_objects(
    label: str, value: Any, timeout_s: float = 120.0
) -> dict[int, Any]:
    """Gathers an object of every process on all of them; every process calls it.

    Args:
      label: describes the objects; the same on all processes.
      value: this process's object, anything that JSON can hold.
      timeout_s: how long to wait for the others, in seconds.

    Returns:
      {process: its object}.

    Raises:
      MissingError: names the processes that did not report in time.
      MultihostError: processes gather objects of another label: they have diverged.
    """
    client, num_processes = compat.coordination_client(), jax.process_count()
    if client is None or num_processes == 1:
        return {0: value}
    prefix, own = f"meshpar/allgather/{next(_calls)}", jax.process_index()
    client.key_value_set(f"{prefix}/{own}", json.dumps([label, value]))
    labels, values, missing = {}, {}, []
    deadline = time.monotonic() + timeout_s
    for process in range(num_processes):
        left_ms = max(1000, int(1000 * (deadline - time.monotonic())))
        try:
            text = client.blocking_key_value_get(f"{prefix}/{process}", left_ms)
            labels[process], values[process] = json.loads(text)
        except jax.errors.JaxRuntimeError:
            missing.append(process)
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        # Process 0 serves these values: it may leave only when all have read them.
        client.wait_at_barrier(f"{prefix}/read", 10_000)
    if missing:
        raise MissingError(
            f"process(es) {missing} of {num_processes} did not report within "
            f"{timeout_s:.0f} s; look at their logs"
        )
    if others := {process: x for process, x in labels.items() if x != label}:
        raise MultihostError(
            f"process {own} gathers {label!r}, but other processes gather {others}: "
            "they have diverged; compare their logs"
        )
    return values


def broadcast(value: np.ndarray, source: int) -> np.ndarray:
    """One process's array on all of them; shapes and dtypes have to be equal."""
    is_source = jax.process_index() == source
    return np.asarray(multihost_utils.broadcast_one_to_all(value, is_source))


def check_fingerprint(fields: Mapping[str, object], timeout_s: float = 120.0) -> None:
    """Compares what all processes are about to run, before the first collective.

    Args:
      fields: {name: value}, e.g. config, layout, versions, device order, data position.
      timeout_s: how long to wait for each process, in seconds.

    Raises:
      MultihostError: names the processes and fields that differ, or the processes that
        are missing; raised on every process.
    """
    own = {name: str(value) for name, value in fields.items()}
    if problems := differing_processes(
        allgather_objects("fingerprint", own, timeout_s)
    ):
        raise MultihostError("the processes differ:\n  " + "\n  ".join(problems))


def differing_processes(fingerprints: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Names the processes that differ from the majority, field by field.

    Args:
      fingerprints: {process: {field: value}}.
    """
    problems = []
    names = sorted({name for fields in fingerprints.values() for name in fields})
    for name in names:
        values = {p: fields.get(name, "nothing") for p, fields in fingerprints.items()}
        (common, count), *others = collections.Counter(values.values()).most_common()
        if not others:
            continue
        if others[0][1] == count:  # No majority.
            each = ", ".join(f"process {p} has {v!r}" for p, v in values.items())
            problems.append(f"{name}: {each}")
        else:
            problems += [
                f"{name}: process {p} has {v!r}, the others {common!r}"
                for p, v in values.items()
                if v != common
            ]
    return problems


def make_any_process(mesh: Mesh) -> Callable[[bool], jax.Array | bool]:
    """Returns `any_process(flag)`: whether any process raised its flag.

    The result is the same on all processes. It is an array that is computed beside the
    training step, so reading it later does not stall the devices. In a single process
    it is the flag itself. Every process must call it equally often.
    """
    if jax.process_count() == 1:
        return bool
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    replicated = NamedSharding(mesh, PartitionSpec())
    reduce_any = jax.jit(lambda flags: flags.any(), out_shardings=replicated)

    def any_process(flag: bool) -> jax.Array:
        own = np.array([flag])
        flags = jax.make_array_from_callback((mesh.size,), split, lambda _: own)
        return reduce_any(flags)

    return any_process
