"""Starts Ray on this machine's loopback, or joins a cluster."""

import atexit
import contextlib
import logging
import os
import sys
import warnings

import ray
from ray._private import ray_constants

from meshpar.islands.zygote import Zygote

_LOOPBACK = "127.0.0.1"

_OUTER_ADDRESSES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""The variable without which Ray keeps to the loopback, on any system."""


def start_ray() -> None:
    """Joins the cluster of RAY_ADDRESS, or starts Ray on this machine's loopback."""
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # By default actors run at a low priority, and starve beside any other work.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Otherwise Ray replaces 127.0.0.1 by an outer address, and listens on all of them.
    # The variable is for its processes; this one read it when it imported Ray.
    os.environ[_OUTER_ADDRESSES] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    with _forked_workers(), warnings.catch_warnings():
        # Ray starts its daemons beside the threads of jax: they do not use jax.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        ray.init(
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address=_LOOPBACK,
        )


def _forked_workers() -> contextlib.AbstractContextManager[None]:
    """Has a zygote fork the workers of a Ray that is started inside.

    Other systems than Linux start them one by one: libraries of macOS do not survive a
    fork.
    """
    if sys.platform != "linux":
        return contextlib.nullcontext()
    zygote = Zygote()
    atexit.register(zygote.close)
    return zygote.starts_workers()
