"""Task graphs of a user, with bounded delay.

A task runs on one worker, and starts when all tasks that it names in `after` are
finished and the worker is free. A worker takes its tasks in the order in which they
were added. Nothing else orders them: tasks that read and write a store of
`meshpar.islands` thus have the consistency that the graph gives.

    graph = TaskGraph()
    graph.iterate(step, iterations=100, workers=4, delay=2)
    graph.run()

`iterate` is the loop of most users. Iteration t starts on a worker when iteration
t - delay - 1 is finished on all of them: 0 is sequential, None is eventual consistency.

Source: Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI
  2014, sections 3.5 (asynchronous tasks and dependency) and 3.6 (bounded delay).
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from meshpar.errors import MeshparError


class Task(NamedTuple):
    """A task of a graph.

    Attributes:
      run: does the work; its result is that of the task.
      worker: number of the worker that runs it.
      after: numbers of the tasks that have to be finished before.
    """

    run: Callable[[], Any]
    worker: int
    after: tuple[int, ...]


class TaskGraph:
    """Tasks and what they wait for, run by a thread for each worker.

    Attributes:
      tasks: in the order in which they were added; a task's place is its number.
    """

    def __init__(self):
        self.tasks: list[Task] = []

    def add(
        self, run: Callable[[], Any], worker: int = 0, after: Iterable[int] = ()
    ) -> int:
        """Adds a task; returns its number.

        Args:
          run: the work.
          worker: number of the worker, from 0.
          after: numbers of tasks that were added before.

        Raises:
          MeshparError: a worker below 0, or a task that does not exist yet.
        """
        waits, number = tuple(after), len(self.tasks)
        if not isinstance(worker, int) or worker < 0:
            raise MeshparError(f"worker={worker!r}: use a whole number from 0 on")
        if unknown := [x for x in waits if x not in range(number)]:
            raise MeshparError(
                f"task {number} waits for {unknown}: a task waits for tasks that were "
                "added before it, so that no two wait for each other"
            )
        self.tasks.append(Task(run, worker, waits))
        return number

    def iterate(
        self,
        run: Callable[[int, int], Any],
        iterations: int,
        workers: int,
        delay: int | None = 0,
    ) -> list[list[int]]:
        """Adds a loop over all workers; returns the numbers of its tasks by iteration.

        Args:
          run: the work of (iteration, worker).
          iterations: of the loop.
          workers: number of workers.
          delay: tau, iterations that others may miss; None for no bound.

        Raises:
          MeshparError: numbers that cannot be.
        """
        least = {"iterations": iterations, "workers": workers}
        wrong = [f"{k}={x!r}" for k, x in least.items() if not _is_whole(x, 1)]
        if wrong or (delay is not None and not _is_whole(delay, 0)):
            raise MeshparError(
                f"{', '.join(wrong) or f'delay={delay!r}'}: use whole numbers, 1 or "
                "more iterations and workers, and a delay from 0 on, or None"
            )
        found: list[list[int]] = []
        for step in range(iterations):
            bounded = delay is not None and step > delay
            after = found[step - delay - 1] if bounded else ()
            found.append(
                [
                    self.add(lambda s=step, w=worker: run(s, w), worker, after)
                    for worker in range(workers)
                ]
            )
        return found

    def run(self) -> list[Any]:
        """Runs all tasks; returns their results by number.

        A task that fails ends the graph: no other one starts, and its error is raised.
        """
        finished, results = [False] * len(self.tasks), [None] * len(self.tasks)
        changed, errors = threading.Condition(), []

        def work(worker: int) -> None:
            for number, task in enumerate(self.tasks):
                if task.worker != worker:
                    continue
                with changed:
                    changed.wait_for(
                        lambda t=task: errors or all(finished[x] for x in t.after)
                    )
                    if errors:
                        return
                try:
                    results[number] = task.run()
                except BaseException as error:  # Raised where the graph was started.
                    with changed:
                        errors.append(error)
                        changed.notify_all()
                    return
                with changed:
                    finished[number] = True
                    changed.notify_all()

        names = sorted({task.worker for task in self.tasks})
        threads = [threading.Thread(target=work, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


def _is_whole(x: Any, least: int) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= least
