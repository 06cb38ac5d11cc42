"""What differs between the jax lines we support, or is not public in them yet."""

import os
from collections.abc import Sequence
from typing import Any

import jax


def prepare_cpu_threads() -> None:
    """Keeps simulated devices from deadlocking on few cores (jaxlib before 0.12).

    The collectives of several programs in flight wait for each other in one small
    thread pool; XLA sizes that pool from NPROC when the CPU backend starts.
    """
    if (os.cpu_count() or 1) < 16:
        os.environ.setdefault("NPROC", "16")


def coordination_client():
    """The key-value client of jax.distributed, or None in a single process."""
    from jax._src import distributed

    return distributed.global_state.client


def backends_started() -> bool:
    """Whether jax has already looked for devices (settings then come too late)."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def set_simulated_devices(count: int) -> None:
    """Sets how many devices the CPU backend of this process will have."""
    jax.config.update("jax_num_cpu_devices", count)


def bind_params(eqn: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    """(functions, parameters) with which an equation's primitive is bound again."""
    found = eqn.primitive.get_bind_params(eqn.params)
    return ((), found) if isinstance(found, dict) else (found[0], found[1])


def detected_cluster() -> tuple[str, int, int] | None:
    """Coordinator, number of processes and own id, as jax finds them in a cluster."""
    from jax._src.clusters import ClusterEnv

    for kind in ClusterEnv._cluster_types:
        if kind.opt_in_only_method or not kind.is_env_present():
            continue
        num = int(kind.get_process_count())
        if num == 1:
            return None
        port = os.environ.get("JAX_COORDINATOR_PORT")
        address = kind.get_coordinator_address(
            timeout_secs=60, override_coordinator_port=port
        )
        return address, num, int(kind.get_process_id())
    return None
