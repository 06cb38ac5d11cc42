"""Many processes, one mesh: start, fingerprint check and agreement.

A process of a multi-process run first joins the others (`initialize`), then all of
them compare what they are about to run (`check_fingerprint`), before any collective.
"""

import collections
import contextlib
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar import compat
from meshpar.multihost.process import MissingError, MultihostError, ProcessInfo
from meshpar.multihost.rendezvous import wait_for_all

_calls = itertools.count()

READ_S = 3600.0
"""How long to wait for others that read from their disks, in seconds."""


def initialize(who: ProcessInfo | None, timeout_s: float = 120) -> None:
    """Joins the other processes of the run; does nothing for a single process.

    Args:
      who: from `clusters.place`.
      timeout_s: how long to wait for the others, in seconds.

    Raises:
      MultihostError: the others did not come in time; names them.
    """
    if who is None:
        return
    wait_for_all(who, timeout_s)
    jax.distributed.initialize(
        who.coordinator,
        who.num_processes,
        who.process_id,
        initialization_timeout=max(1, int(timeout_s)),
    )
    local = jax.local_devices()
    print(
        f"process {who.process_id} of {who.num_processes} on {socket.gethostname()}, "
        f"pid {os.getpid()}: {len(local)} x {local[0].device_kind}",
        flush=True,
    )


def allgather_objects(
    what: str, value: Any, timeout_s: float = 120.0
) -> dict[int, Any]:
    """Tells every process a value of each, {process: value}; all have to call it.

    Args:
      what: what is told, the same on all processes.
      value: anything that JSON can say.
      timeout_s: how long to wait for the others, in seconds.

    Raises:
      MissingError: names the processes that did not come.
      MultihostError: processes that tell something else: they have parted ways.
    """
    client, num = compat.coordination_client(), jax.process_count()
    if client is None or num == 1:
        return {0: value}
    prefix, mine = f"meshpar/exchange/{next(_calls)}", jax.process_index()
    client.key_value_set(f"{prefix}/{mine}", json.dumps([what, value]))
    told, everyone, missing = {}, {}, []
    deadline = time.monotonic() + timeout_s
    for process in range(num):
        left_ms = max(1000, int(1000 * (deadline - time.monotonic())))
        try:
            text = client.blocking_key_value_get(f"{prefix}/{process}", left_ms)
            told[process], everyone[process] = json.loads(text)
        except jax.errors.JaxRuntimeError:
            missing.append(process)
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        # Process 0 serves these values: nobody leaves before all have read them.
        client.wait_at_barrier(f"{prefix}/read", 10_000)
    if missing:
        raise MissingError(
            f"process(es) {missing} of {num} did not report within {timeout_s:.0f} s; "
            "look at their logs"
        )
    if odd := {process: other for process, other in told.items() if other != what}:
        raise MultihostError(
            f"process {mine} tells the others its {what!r}, but these tell {odd}"
        )
    return everyone


def broadcast(value: np.ndarray, source: int) -> np.ndarray:
    """The value of one process on all of them; shapes and dtypes have to be equal."""
    is_source = jax.process_index() == source
    return np.asarray(multihost_utils.broadcast_one_to_all(value, is_source))


def check_fingerprint(fields: Mapping[str, object], timeout_s: float = 120.0) -> None:
    """Compares what all processes are about to run, before the first collective.

    Args:
      fields: {name: value}, e.g. config, layout, versions, device order, data position.
      timeout_s: how long to wait for each process, in seconds.

    Raises:
      MultihostError: names the odd process and field, or the processes that are
        missing; raised on every process.
    """
    own = {name: str(value) for name, value in fields.items()}
    if problems := differing_processes(
        allgather_objects("fingerprint", own, timeout_s)
    ):
        raise MultihostError("the processes differ:\n  " + "\n  ".join(problems))


def differing_processes(everyone: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Says which processes differ from the majority, field by field."""
    problems = []
    names = sorted({name for fields in everyone.values() for name in fields})
    for name in names:
        values = {process: f.get(name, "nothing") for process, f in everyone.items()}
        (common, count), *others = collections.Counter(values.values()).most_common()
        if not others:
            continue
        if others[0][1] == count:
            said = ", ".join(f"process {p} has {v!r}" for p, v in values.items())
            problems.append(f"{name}: {said}")
        else:
            problems += [
                f"{name}: process {p} has {v!r}, the others {common!r}"
                for p, v in values.items()
                if v != common
            ]
    return problems


def make_any_process(mesh: Mesh) -> Callable[[bool], jax.Array | bool]:
    """Returns `any_process(flag)`: whether any process raised its flag.

    The answer is the same on all processes. It is an array that computes beside the
    training step, so reading it later does not stall the devices. In a single process
    it is the flag itself. Every process must call it equally often.
    """
    if jax.process_count() == 1:
        return bool
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    whole = NamedSharding(mesh, PartitionSpec())
    anywhere = jax.jit(lambda flags: flags.any(), out_shardings=whole)

    def any_process(flag: bool) -> jax.Array:
        own = np.array([flag])
        flags = jax.make_array_from_callback((mesh.size,), split, lambda _: own)
        return anywhere(flags)

    return any_process
