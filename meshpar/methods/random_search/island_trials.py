"""Trials as islands: runs that share nothing, each by the worker that is free next.

A trial is a function of its values. Workers are threads of this process, or processes
in Ray: if one of those dies, its trial is run again, and the others go on. Trials of a
small model run faster in one program (`trials.py`); these may have any layout, and may
differ in length.

Source: Bergstra, Bengio, Random Search for Hyper-Parameter Optimization, JMLR 2012.
"""

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from meshpar.errors import MeshparError
from meshpar.islands.mode import HOSTS, need_ray
from meshpar.methods.random_search.trials import count

Outcome = TypeVar("Outcome")
"""The result of a trial."""


def search(
    run: Callable[[dict[str, Any]], Outcome],
    values: Mapping[str, Sequence[Any]],
    *,
    workers: int = 4,
    host: str = "threads",
    retries: int = 3,
) -> list[Outcome]:
    """Runs every trial once.

    Args:
      run: {name of a hyperparameter: value} -> what the trial found. In Ray it and its
        outcome are pickled.
      values: {name: [trials]}, such as those of `trials.grid`.
      workers: trials that run at the same time.
      host: "threads" or "ray".
      retries: times that Ray runs a trial again whose process died.

    Returns:
      What each trial found, in the order of the values.

    Raises:
      MeshparError: values of unequal lengths or none, no worker, an unknown host, or
        no Ray.
      Exception: the first that a trial raises; trials that have not begun are left out.
    """
    count(values)
    if host not in HOSTS:
        raise MeshparError(f"host={host!r}: use one of {HOSTS}")
    if workers < 1 or retries < 0:
        raise MeshparError(
            f"workers={workers}, retries={retries}: use at least one worker, and 0 or "
            "more retries"
        )
    columns = zip(*values.values(), strict=True)
    trials = [dict(zip(values, column, strict=True)) for column in columns]
    one = run if host == "threads" else _in_ray(run, retries)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        started = [pool.submit(one, trial) for trial in trials]
        try:
            return [future.result() for future in started]
        finally:
            pool.shutdown(cancel_futures=True)


def _in_ray(
    run: Callable[[dict[str, Any]], Outcome], retries: int
) -> Callable[[dict[str, Any]], Outcome]:
    """The function, run by a process of Ray; Ray starts it again if that dies."""
    need_ray()
    import ray

    from meshpar.islands.ray_start import start_ray

    start_ray()
    task = ray.remote(_call).options(num_cpus=0, max_retries=retries)
    return lambda trial: ray.get(task.remote(run, trial))


def _call(run: Callable[[dict[str, Any]], Outcome], trial: dict[str, Any]) -> Outcome:
    return run(trial)  # Ray takes functions alone, not all that can be called.
