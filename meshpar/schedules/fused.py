"""Schedules of fused ticks: GPipe, 1F1B, interleaved 1F1B and PipeDream.

F and B of different microbatches share ticks, and B computes the weights' gradients.
"""

import dataclasses

from meshpar.errors import LayoutError
from meshpar.schedules.table import Op, Schedule


def check_one_chunk(name: str, num_chunks: int) -> None:
    """Raises LayoutError if a schedule of one chunk per stage is asked for more."""
    if num_chunks != 1:
        raise LayoutError(
            f"schedule={name} has one chunk of layers per stage, not virtual_stages="
            f"{num_chunks}; use schedule=interleaved, or leave virtual_stages out"
        )


def fused(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int, start: int
) -> Schedule:
    """Runs microbatches in rounds of num_stages, chunk by chunk; B mirrors F.

    The first B runs in tick `start`.
    """
    size = num_stages * num_chunks
    if num_chunks > 1 and num_microbatches % num_stages:
        raise LayoutError(
            f"schedule={name}: microbatches={num_microbatches} is not a multiple of "
            f"pipe={num_stages}; use a multiple of {num_stages}, or schedule=1f1b"
        )
    forward, backward = {}, {}
    for m in range(num_microbatches):
        turn, offset = divmod(m, num_stages) if num_chunks > 1 else (0, m)
        for v in range(num_chunks):
            for p in range(num_stages):
                begin = turn * size + offset
                op, back = Op(m, v, p), num_chunks - 1 - v
                forward[op] = begin + v * num_stages + p
                backward[op] = start + begin + back * num_stages + num_stages - 1 - p
    return Schedule(name, num_stages, num_microbatches, num_chunks, forward, backward)


def gpipe(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """GPipe: all forward passes, then all backward passes.

    Bubble (P-1)/(M+P-1). A stage holds M stage inputs.

    Source: Huang et al., GPipe, arXiv:1811.06965, section 2.3.
    """
    check_one_chunk("gpipe", num_chunks)
    forwards = num_microbatches + num_stages - 1
    return fused("gpipe", num_stages, num_microbatches, 1, forwards)


def one_f_one_b(
    num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> Schedule:
    """1F1B with a flush: B of a microbatch starts as soon as its F passes are done.

    Bubble (P-1)/(M+P-1). A stage holds at most 2P-1 stage inputs for any M; P would do
    if F and B did not share ticks.

    Source: Narayanan et al., PipeDream, arXiv:1806.03377, section 3.2 (1F1B);
      Memory-Efficient Pipeline-Parallel DNN Training, arXiv:2006.09503 (the flush).
    """
    check_one_chunk("1f1b", num_chunks)
    return fused("1f1b", num_stages, num_microbatches, 1, num_stages - 1)


def pipedream(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """PipeDream: the ticks of 1F1B, with an update of the weights after every B.

    Bubble 2(P-1)/(M+2(P-1)), because every tick runs F, B and an update.
    `meshpar/pipeline/pipedream.py` explains the staleness.

    Source: Narayanan et al., PipeDream, arXiv:1806.03377, section 3.2.
    """
    check_one_chunk("pipedream", num_chunks)
    ticks = fused("pipedream", num_stages, num_microbatches, 1, num_stages - 1)
    return dataclasses.replace(ticks, asynchronous=True)


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Interleaved 1F1B: several chunks of layers per stage, for a smaller bubble.

    Bubble (P-1)/(V*M+P-1). V is at least 2 and M a multiple of P.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU
      Clusters, arXiv:2104.04473, section 2.2.
    """
    if num_chunks < 2:
        raise LayoutError(
            f"schedule=interleaved needs virtual_stages of at least 2, not "
            f"{num_chunks}; or use schedule=1f1b"
        )
    start = num_chunks * num_stages - 1
    return fused("interleaved", num_stages, num_microbatches, num_chunks, start)
