"""1F1B-RR: the order in which workers of replicated stages take minibatches.

Stage s has r_s workers. Minibatch m goes to worker m modulo r_s, for its forward (F)
and for its backward pass (B) (round robin). A worker starts with a few F, so that
the machines behind it have work, and then runs one B and one F in turn (1F1B).

Source: Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training,
  SOSP 2019, sections 3.2 and 3.3.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from meshpar.errors import MeshparError

FORWARD, BACKWARD = "F", "B"


class Worker(NamedTuple):
    """One machine: a replica of a stage."""

    stage: int
    replica: int


class Op(NamedTuple):
    """One pass of a minibatch through a stage; kind is F or B."""

    kind: str
    minibatch: int


def warm_up(replicas: Sequence[int]) -> list[int]:
    """Minibatches that each worker of a stage has in flight in the steady state.

    As many as there are machines from the stage to the end, over those of the stage;
    that of the first stage is the paper's NOAM.

    Args:
      replicas: workers of each stage.
    """
    return [math.ceil(sum(replicas[s:]) / r) for s, r in enumerate(replicas)]


def orders(
    replicas: Sequence[int], num_minibatches: int
) -> dict[Worker, tuple[Op, ...]]:
    """{worker: its operations, in order}.

    Args:
      replicas: workers of each stage.
      num_minibatches: a multiple of every stage's workers.

    Raises:
      MeshparError: numbers that cannot be, or minibatches that leave workers without
        one in the last round.
    """
    check(replicas, num_minibatches)
    found = {}
    for stage, ahead in enumerate(warm_up(replicas)):
        for replica in range(replicas[stage]):
            own = range(replica, num_minibatches, replicas[stage])
            ops = [Op(FORWARD, m) for m in own[:ahead]]
            for index, m in enumerate(own):
                ops.append(Op(BACKWARD, m))
                ops += [Op(FORWARD, f) for f in own[index + ahead : index + ahead + 1]]
            found[Worker(stage, replica)] = tuple(ops)
    return found


def check(replicas: Sequence[int], num_minibatches: int) -> None:
    """Refuses numbers that cannot be.

    Raises:
      MeshparError: with the numbers.
    """
    if not replicas or min(replicas) < 1 or num_minibatches < 1:
        raise MeshparError(
            f"replicas={tuple(replicas)}, {num_minibatches} minibatches: give at least "
            "one worker per stage, and one minibatch"
        )
    rounds = math.lcm(*replicas)
    if num_minibatches % rounds:
        raise MeshparError(
            f"{num_minibatches} minibatches do not divide over stages of "
            f"{tuple(replicas)} workers: use a multiple of {rounds}"
        )
