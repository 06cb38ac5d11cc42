"""Time to accuracy: passes over the data, times the time of a pass.

Larger batches let more workers share a step, and need more passes for the same loss. A
step of B rows on P workers computes B / P rows, and sums a gradient of m bytes around a
ring: T = B t / P + 2 (P - 1) latency + 2 (P - 1) / P m / bandwidth. How many passes a
batch size needs is measured.

Source: Goyal et al., arXiv:1706.02677 (batches of many workers); McCandlish et al., An
  Empirical Model of Large-Batch Training, arXiv:1812.06162 (passes grow with batches);
  Coleman et al., DAWNBench, 2017 (time to accuracy as the measure).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from meshpar.errors import MeshparError


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Equal workers on a ring.

    Attributes:
      row_seconds: of the gradient of one row on one worker.
      gradient_bytes: that all workers sum after each step.
      latency: seconds of a message without bytes.
      bandwidth: bytes per second of a link.
    """

    row_seconds: float
    gradient_bytes: float
    latency: float
    bandwidth: float

    def step_seconds(self, workers: int, batch: float) -> float:
        """Seconds of a step; workers share its rows equally."""
        sent = 2 * (workers - 1) / workers * self.gradient_bytes
        messages = 2 * (workers - 1) * self.latency
        return batch / workers * self.row_seconds + messages + sent / self.bandwidth

    def pass_seconds(self, workers: int, batch: float, rows: int) -> float:
        """Seconds of a pass over rows of data."""
        return rows / batch * self.step_seconds(workers, batch)

    def best_workers(self, batch: float) -> float:
        """The number of workers with the shortest step, between 1 and the batch.

        The derivative of the step's time is 0 at sqrt((B t - 2 m / bandwidth) /
        (2 latency)). It need not be whole.
        """
        shared = batch * self.row_seconds - 2 * self.gradient_bytes / self.bandwidth
        if shared <= 0:
            return 1.0
        best = math.sqrt(shared / (2 * self.latency)) if self.latency else math.inf
        return min(max(best, 1.0), float(batch))


class Fastest(NamedTuple):
    """The fastest way to a loss.

    Attributes:
      batch: rows of a step.
      workers: that share them.
      seconds: until the loss is reached.
    """

    batch: int
    workers: int
    seconds: float


def seconds(
    cluster: Cluster, passes: Mapping[int, float], rows: int, workers: int, batch: int
) -> float:
    """Seconds until a loss is reached: passes times the time of a pass.

    Args:
      cluster: the workers.
      passes: {batch size: passes until the loss is reached, as measured}.
      rows: of the data.
      workers: number of them.
      batch: one of those in `passes`.

    Raises:
      MeshparError: passes of this batch size are not known, or there are no workers.
    """
    if batch not in passes:
        known = ", ".join(map(str, sorted(passes)))
        raise MeshparError(
            f"batch={batch}: passes are known of {known}; use one of them"
        )
    if not 1 <= workers <= batch:
        raise MeshparError(f"workers={workers} for {batch} rows: use 1 to {batch}")
    return passes[batch] * cluster.pass_seconds(workers, batch, rows)


def fastest(
    cluster: Cluster, passes: Mapping[int, float], rows: int, most: int
) -> Fastest:
    """The batch size and the workers that reach a loss first, by the closed form.

    Args:
      cluster: the workers.
      passes: {batch size: passes until the loss is reached, as measured}.
      rows: of the data.
      most: number of workers that there are.
    """
    found = []
    for batch in passes:
        best = min(cluster.best_workers(batch), most)
        for workers in {math.floor(best), min(math.ceil(best), most, batch)}:
            time = seconds(cluster, passes, rows, workers, batch)
            found.append(Fastest(batch, workers, time))
    return min(found, key=lambda one: one.seconds)
