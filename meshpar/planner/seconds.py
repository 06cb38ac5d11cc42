"""Predicts the time of a step: compute by FLOPs, transfers by their contract.

A transfer beside a pass over the layers hides as long as the compute of that pass
lasts; all others are exposed. A pipeline runs in ticks: every stage waits for the
slowest, and a tick without work costs as much as one with work.
"""

import dataclasses
from typing import NamedTuple, Self

from meshpar.fsdp.terms import WEIGHTS, weight_reading
from meshpar.layouts.axes import PIPE
from meshpar.layouts.layer_uses import FEATURES, ROWS
from meshpar.layouts.layout import Layout
from meshpar.layouts.mixes import average
from meshpar.layouts.remat import KEEPS_MATMULS, NONE, repeats
from meshpar.lowering.layer_trace import TracedLayer, logits_ways
from meshpar.lowering.memory import Memory
from meshpar.lowering.runner import Runner
from meshpar.lowering.shard_map import ShardMapLowering
from meshpar.mesh.chips import GPU, TPU
from meshpar.mesh.machine import Machine
from meshpar.mesh.platform import platform_named
from meshpar.ops.attention_kernels import NAMES
from meshpar.planner.facts import Facts
from meshpar.planner.transfers import (
    Beside,
    Traffic,
    host_seconds,
    link,
    state_seconds,
    tensor_seconds,
)

_UPDATE_BYTES = 32
"""Bytes that an update of Adam reads and writes for a parameter, in float32: weight
and two moments both ways, and the gradient, which is clipped."""

_BACKWARD_OF_CUDNN = 2.5
"""Matmuls of cuDNN's attention backward over those forward: it computes the scores
again."""


class Factors(NamedTuple):
    """Bytes that a chip and its memory exchange, for each byte of a kind.

    Attributes:
      held: that a layer holds, in each pass.
      saved: that a layer saves, written and read.
      looped: that loops of the head read or write, such as its weight and the sum of
        its gradients in each block of the loss.
      summed: of gradients and of their sums, in each microbatch.
      state_moves: of weights and gradients that the device sends, which is sliced,
        copied and added to.
      ring_sums: in addition of what goes around rings, but for what is gathered: parts
        of gradients that are cut out and added, and tokens of experts.
      tensor_moves: of activations that the device sends over `tensor`.
      grouped: of rows as wide as the activations that grouped matmuls read and write,
        forward.
      grouped_backward: of the same rows, backward.
      hidden: of the other rows of grouped matmuls, which `tensor` splits, forward.
      hidden_backward: of the same rows, backward.
      copied: of a layer's experts that are copied for grouped matmuls, forward.
      copied_backward: of the same experts, backward, whose gradients are added.
      exposed: seconds of transfers, where they run beside compute, for each second that
        compute does not hide.
    """

    held: float
    saved: float
    looped: float
    summed: float
    state_moves: float
    ring_sums: float
    tensor_moves: float
    grouped: float
    grouped_backward: float
    hidden: float
    hidden_backward: float
    copied: float
    copied_backward: float
    exposed: float


FACTORS = Factors(
    held=1.13,
    saved=3.76,
    looped=1.15,
    summed=3.46,
    state_moves=2.3,
    ring_sums=6.15,
    tensor_moves=3.86,
    grouped=7.58,
    grouped_backward=0.14,
    hidden=0.0,
    hidden_backward=10.87,
    copied=0.0,
    copied_backward=15.0,
    exposed=1.75,
)
"""Those of the last fit to the cycles that compilers for TPUs state, by
`experiments.benchmarks.planner_fit`."""

ON_GPUS = Factors(
    held=0.609,
    saved=2.274,
    looped=0.5,
    summed=1.7,
    state_moves=2.3,
    ring_sums=0.0,
    tensor_moves=5.2,
    grouped=1.1,
    grouped_backward=2.5,
    hidden=0.0,
    hidden_backward=0.0,
    copied=6.0,
    copied_backward=28.0,
    exposed=1.0,
)
"""Those of GPUs: `held` and `saved` are fitted to steps measured on cards, by
`experiments.benchmarks.gpu_fit`; no step measured the others."""


def _factors(machine: Machine) -> Factors:
    """The factors of a machine's chips."""
    return ON_GPUS if machine.chip.platform == GPU else FACTORS


_NO_TERMS = "wire_bytes", "kernels"


@dataclasses.dataclass(frozen=True)
class Terms:
    """Time of a step by term; bytes, and parts of other terms, are no terms."""

    def slower(self, times: float) -> Self:
        """Multiplies all seconds, and keeps the bytes."""
        own = vars(self)
        return type(self)(
            **{n: x if n == "wire_bytes" else times * x for n, x in own.items()}
        )

    @property
    def by_term(self) -> dict[str, float]:
        """The seconds of each term, {term: seconds}."""
        return {name: x for name, x in vars(self).items() if name not in _NO_TERMS}

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.by_term.values())


@dataclasses.dataclass(frozen=True)
class Seconds(Terms):
    """Predicted time of a step of a model with layers, by term.

    Attributes:
      layers: compute of the layers that every device would do without a pipeline.
      again: compute of layers that rematerialization repeats.
      bubble: ticks in which a stage waits, or repeats a stage.
      outside: compute of embedding and head.
      update: the optimizer.
      saved: activations on their way to memory and back.
      fresh: memory for temporary arrays, where a computer gives it page by page.
      moves: slices, copies and additions of what devices send.
      idle: gaps between the kernels of a GPU.
      state: exposed transfers of weights and gradients.
      tensor: exposed transfers of activations inside layers, and between layers that
        use `tensor` in different ways.
      sends: transfers between stages.
      latency: what messages of `state`, `tensor` and `sends` take beside their bytes.
      host: exposed transfers between device and host memory.
      wire_bytes: bytes that one device sends in all.
      kernels: part of the total that kernels take (attention and, on TPUs, grouped
        matmuls); estimates of compiled programs leave them out.
    """

    layers: float
    again: float
    bubble: float
    outside: float
    update: float
    saved: float
    fresh: float
    moves: float
    idle: float
    state: float
    tensor: float
    sends: float
    latency: float
    host: float
    wire_bytes: float
    kernels: float


def step_seconds(
    lowering: ShardMapLowering,
    facts: Facts,
    machine: Machine,
    rows: float,
    traced: TracedLayer,
    traffic: Traffic,
    memory: Memory,
) -> Seconds:
    """Predicts the time of a step.

    Args:
      lowering: of the layout.
      facts: of the model.
      machine: that it runs on.
      rows: of a microbatch on one device.
      traced: bytes of one layer and of the head on one device.
      traffic: what a step moves.
      memory: of a step, on one device.
    """
    layout, runner = lowering.layout, lowering.runner
    layer = _layer_seconds(layout, facts, machine, rows)
    passes = _Passes.of(runner, layer)
    compute = passes.compute
    needed = layout.microbatches * lowering.model.layered.depth / layout.pipe
    # Stages that save their inputs run forward once more.
    stages_again = layer.forward if passes.repeats else 0.0
    layers = needed * (3 * layer.forward + layer.backward_more)
    again = needed * (layer.again + stages_again)
    memory_bandwidth, factors = machine.chip.memory_bandwidth, _factors(machine)
    update = sum(leaf.bytes_per_device for leaf in lowering.plan.parameters.values())
    update *= _UPDATE_BYTES / 4 / memory_bandwidth
    if lowering.owned_update is not None:
        groups = lowering.owned_update.groups
        update += sum(group.flops for group in groups) / machine.flops
    state = state_seconds(machine, traffic.moved, compute)
    state_bytes = traffic.moved.wire_bytes
    tensor, tensor_bytes = tensor_seconds(lowering, machine, traffic, traced)
    exposed = factors.exposed if machine.overlaps else 1.0
    moves = factors.state_moves * state_bytes + factors.tensor_moves * tensor_bytes
    moves += factors.ring_sums * traffic.moved.ring_sums
    moves += _grouped_moves(runner, traced, factors)
    if layout.microbatches > 1:
        moves += factors.summed * layout.microbatches * memory.gradients
    sends = traffic.sends * traffic.activation_bytes / layout.tensor
    to_stages = link(lowering, machine, (PIPE,))
    # Without a loop nothing is copied into stacks, and out of them.
    saves = passes.saves if lowering.zero.loops else 0
    return Seconds(
        layers=layers,
        again=again,
        bubble=max(0.0, sum(compute.values()) - layers - again),
        outside=_outside_seconds(lowering, facts, machine, rows),
        update=update,
        saved=factors.saved * saves * traced.saved / memory_bandwidth,
        fresh=memory.temporary / machine.fresh_bandwidth,
        moves=moves / memory_bandwidth,
        idle=passes.runs * machine.idle,
        state=exposed * state.of_bytes,
        tensor=exposed * tensor.of_bytes,
        sends=sends / to_stages.bandwidth,
        latency=state.latency + tensor.latency + traffic.sends * to_stages.latency,
        host=host_seconds(lowering, machine, traffic, compute),
        wire_bytes=state_bytes + tensor_bytes + sends,
        kernels=passes.kernels,
    )


def _outside_seconds(
    lowering: ShardMapLowering, facts: Facts, machine: Machine, rows: float
) -> float:
    """The time of embedding and head in a step; takes arguments of `step_seconds`."""
    layout, heads = lowering.layout, lowering.layout.microbatches
    each = rows * facts.flops.outside / machine.flops
    # Each device runs as many rounds as its part of a sequence has blocks.
    looped = facts.flops.looped / layout.context
    each += _factors(machine).looped * looped / machine.chip.memory_bandwidth
    # Each device computes all logits of its rows if nothing splits the vocabulary.
    each /= logits_ways(facts.layered, lowering.plan)
    if layout.pipe > 1:
        # Embedding and head of a pipeline run in ticks of their own stages.
        heads = lowering.runner.loop.count_ticks("head")
        each /= layout.pipe if layout.splits_vocabulary else 1
    return heads * each


class _Passes(NamedTuple):
    """Time of all passes over the layers in one step, on one device.

    Attributes:
      compute: seconds that transfers may stand beside.
      kernels: the part of that in kernels, as of a layer.
      saves: times that a layer saves for its backward pass, or reads what it saved.
      runs: times that a layer runs, forward or backward.
      repeats: whether stages of a pipeline run forward again, to save then.
    """

    compute: dict[Beside, float]
    kernels: float
    saves: int
    runs: int
    repeats: bool

    @classmethod
    def of(cls, runner: Runner, layer: "_LayerSeconds") -> "_Passes":
        compute: dict[Beside, float] = {}
        saves, runs, in_kernels = 0, 0, 0.0
        by_use = {FEATURES: runner.layer_passes, ROWS: runner.row_passes}
        names = {run.name for run in runner.layer_passes}
        repeats, splits = "forward again" in names, WEIGHTS in names
        for use, run in ((use, run) for use, own in by_use.items() for run in own):
            times = runner.lasting_runs(run) * run.depth
            seconds, kernels = layer.of(run.name)
            if run.name == "backward" and splits:
                seconds -= layer.matmuls
            beside = Beside(run.name, use)
            compute[beside] = compute.get(beside, 0.0) + times * seconds
            in_kernels += times * kernels
            runs += times
            saves += 0 if repeats and run.name == "forward" else times
        return cls(compute, in_kernels, saves, runs, repeats)


def _grouped_moves(runner: Runner, traced: TracedLayer, factors: Factors) -> float:
    """Bytes between a chip and its memory around the grouped matmuls of experts."""
    experts, total = runner.copied_experts, 0.0
    for run in weight_reading([*runner.layer_passes, *runner.row_passes]):
        of_rows, of_hidden, of_experts = factors.grouped, factors.hidden, factors.copied
        if run.name == "backward":
            of_rows, of_hidden = factors.grouped_backward, factors.hidden_backward
            of_experts = factors.copied_backward
        each = of_rows * traced.grouped_whole + of_hidden * traced.grouped
        each += of_experts * experts
        total += run.runs * run.depth * each
    return total


class _LayerSeconds(NamedTuple):
    """Compute of one layer on one device.

    Attributes:
      forward: of its forward pass.
      kernels: the part of that in kernels, whose cycles no compiler states: attention
        and, on TPUs, grouped matmuls.
      matmuls: the part of that in matmuls with weights.
      again: that its backward pass repeats.
      kernels_again: the part of that in kernels.
      backward_more: of kernels whose backward pass takes more than twice as long.
    """

    forward: float
    kernels: float
    matmuls: float
    again: float
    kernels_again: float
    backward_more: float = 0.0

    def of(self, name: str) -> tuple[float, float]:
        """Seconds of a named pass: (in all, in kernels)."""
        if name == WEIGHTS:
            return self.matmuls, 0.0
        if name != "backward":
            return self.forward, self.kernels
        all_seconds = 2 * self.forward + self.backward_more + self.again
        in_kernels = 2 * self.kernels + self.backward_more + self.kernels_again
        return all_seconds, in_kernels


def _layer_seconds(
    layout: Layout, facts: Facts, machine: Machine, rows: float
) -> _LayerSeconds:
    """The compute of one layer with some rows."""
    # What a layer holds is what its elementwise operations make.
    held = facts.layer(layout, rows, layout.tensor).running
    kernel = facts.flops.kernel
    elementwise = _factors(machine).held * machine.elementwise * held
    elementwise /= machine.chip.memory_bandwidth
    row_seconds = rows / layout.tensor / machine.flops
    kernels, more = row_seconds * facts.flops.kernels, 0.0
    if kernel:
        slower = machine.flops / machine.attention_flops(kernel.width, kernel.length)
        kernels *= kernel.computed * slower
        more = (_BACKWARD_OF_CUDNN - 2) * kernels
    faster = 1 - 1 / machine.chip.float8_speed
    matmuls = row_seconds * (facts.flops.layer - faster * facts.flops.float8)
    forward = matmuls + kernels + elementwise
    narrow = rows / layout.tensor * facts.flops.narrow / machine.chip.peak_flops
    forward += machine.narrow * narrow
    name = NAMES[platform_named(machine.devices[0].platform)]

    def kernels_of(policy: str) -> float:
        return kernels if repeats(policy, name) else 0.0

    def again_of(policy: str) -> float:
        if policy in (NONE, *KEEPS_MATMULS):
            return kernels_of(policy) + (elementwise if policy != NONE else 0.0)
        return forward - kernels + kernels_of(policy)

    is_tpu = machine.chip.platform == TPU
    grouped = row_seconds * facts.flops.grouped if is_tpu else 0.0

    def uncounted_of(policy: str) -> float:
        keeps = policy in (NONE, *KEEPS_MATMULS)
        return kernels_of(policy) + (0.0 if keeps else grouped)

    policies = layout.remat, facts.layered.depth
    again, kernels_again = (average(*policies, of) for of in (again_of, uncounted_of))
    return _LayerSeconds(
        forward, kernels + grouped, matmuls, again, kernels_again, more
    )
