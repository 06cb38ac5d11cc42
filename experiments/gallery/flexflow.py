"""FlexFlow: the search against trying all, the simulator against an event loop."""

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
from flax import nnx

import meshpar
from experiments.gallery import wires
from experiments.gallery.paper import Claim, Paper, Result, Setting
from meshpar.layouts.axes import AXES
from meshpar.mesh.machine import Machine, machine_of
from meshpar.methods import flexflow
from meshpar.methods.flexflow.choices import SEARCHED, Choices
from meshpar.methods.flexflow.graph import Graph
from meshpar.methods.flexflow.ledger import Ledger
from meshpar.methods.flexflow.markov import MarkovSearch
from meshpar.methods.flexflow.step_trace import trace_step
from meshpar.methods.flexflow.strategies import Cost, Strategies

_DEVICES, _ROWS, _BUDGET = 8, 32, 2000
_FLOPS, _INSTANT = 7e10, 1e30
"""FLOP/s of a device in the simulator; bytes per second that take no time."""

_LINKS = (1e7, 1e8, 1e9)
_EQUAL = 1e-6
_ADAM = optax.adam(1e-2)
CHAINS = {"3 matmuls": (16, 64, 64, 32), "6 matmuls": (16, 32, 64, 32, 64, 32, 16)}
"""{name: widths}."""

MESHES = (
    ("3 matmuls", {"tensor": 8}),
    ("3 matmuls", {"data": 2, "expert": 2, "fsdp": 2}),
    ("6 matmuls", {"tensor": 8}),
)
"""(chain, sizes of the mesh) whose states are few enough to try them all."""

MEGATRON = 'paths."0/kernel"=none/tensor,paths."1/kernel"=tensor/none'
LAYOUTS = (
    "data=8",
    f"tensor=8,{MEGATRON}",
    f"data=2,tensor=4,{MEGATRON}",
    "fsdp=8,zero=2,paths.kernel=fsdp/none",
    'data=4,tensor=2,paths."0/kernel"=none/none,paths."1/kernel"=tensor/none',
)
_WIDTHS = 32, 128, 64
"""Of the two matmuls of these layouts."""


def _squares(module: Any, batch: Mapping[str, Any]) -> Any:
    return jnp.square(module(batch["x"]) - batch["y"]).mean()


def _linear(size: tuple[int, int], rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(*size, use_bias=False, rngs=rngs)


@functools.cache
def chain(widths: tuple[int, ...]) -> meshpar.Model:
    """Matmuls with an activation between them."""

    class Chain(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            pairs = itertools.pairwise(widths)
            self.layers = nnx.List([_linear(size, rngs) for size in pairs])

        def __call__(self, x: Any) -> Any:
            for layer in self.layers[:-1]:
                x = nnx.relu(layer(x))
            return self.layers[-1](x)

    return meshpar.from_nnx(Chain, _squares)


def _batch(widths: Sequence[int]) -> dict[str, jax.ShapeDtypeStruct]:
    sizes = {"x": widths[0], "y": widths[-1]}
    return {
        name: jax.ShapeDtypeStruct((_ROWS, size), jnp.float32)
        for name, size in sizes.items()
    }


def machine(link: float) -> Machine:
    """Eight devices that only compute and send; memory takes no time."""
    made = machine_of(jax.devices()[:_DEVICES])
    chip = dataclasses.replace(
        made.chip,
        peak_flops=_FLOPS,
        memory_bandwidth=_INSTANT,
        link_bandwidth=link / 2,  # Of each direction of a ring.
        num_links=1,
    )
    return dataclasses.replace(made, chip=chip, efficiency=1.0, overlaps=True)


@functools.cache
def _graph(widths: tuple[int, ...]) -> Graph:
    return trace_step(chain(widths), _batch(widths), None, {})


def strategies(
    widths: tuple[int, ...], link: float, sizes: Mapping[str, int]
) -> Strategies:
    """The states of one mesh."""
    model = chain(widths)
    mesh = {axis: sizes.get(axis, 1) for axis in SEARCHED}
    params = {path: jnp.zeros(p.shape) for path, p in model.params.items()}
    given = {"zero": 2} if mesh["fsdp"] > 1 else {}
    choices = Choices(model.params, (), mesh, given)
    ledger = Ledger(model, jax.eval_shape(_ADAM.init, params), None, mesh, given)
    return Strategies(_graph(widths), choices, ledger, machine(link), None)


class Searched(NamedTuple):
    """One mesh: costs of the chains' best state and of all states, in seconds."""

    found: float
    least: float
    data_parallel: float
    states: int


def searched(name: str, sizes: Mapping[str, int], link: float, seed: int) -> Searched:
    """Runs the chains of a mesh, and tries all its states one by one."""
    made = strategies(CHAINS[name], link, sizes)
    starts = made.choices.data_parallel, made.choices.by_default_rules
    found = MarkovSearch(made.choices.all, made.price, _BUDGET, seed).chains(starts)
    ranges = [range(len(choice.options)) for choice in made.choices.all]
    costs = [made.price(state) for state in itertools.product(*ranges)]
    plain = made.price(starts[0])
    return Searched(found.cost, min(costs), plain, len(costs))


def search_claims(
    seeds: Sequence[int], meshes: Sequence[tuple] = MESHES
) -> list[Claim]:
    """Whether the chains find the best of all states."""
    found = [
        searched(name, sizes, _LINKS[1], seed)
        for (name, sizes), seed in itertools.product(meshes, seeds)
    ]
    best = sum(x.found == x.least < math.inf for x in found)
    states = ", ".join(f"{x.states:,}" for x in found[:: len(seeds)])
    return [
        Claim(
            f"chains find the best of all states, tried one by one: {states}",
            "the global optimum of small graphs (section 8.4)",
            f"in {best} of {len(found)} searches",
            best == len(found),
        )
    ]


class _Task(NamedTuple):
    """A matmul of a step: its FLOPs, and what is sent when it is done.

    Attributes:
      flops: on one device.
      sends: bytes that a device sends of the result.
      waited: whether the next matmul waits for them.
    """

    flops: float
    sends: float
    waited: bool


def _matmuls(widths: tuple[int, ...]) -> list[tuple[int, tuple[int, ...], bool]]:
    """(FLOPs, shape of the result, whether it is a gradient) in jax's own order."""
    sizes = list(itertools.pairwise(widths))

    def loss(weights: list, x: jax.Array, y: jax.Array) -> jax.Array:
        for w in weights[:-1]:
            x = jnp.maximum(x @ w, 0)
        return jnp.square(x @ weights[-1] - y).mean()

    weights = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]
    x, y = _batch(widths).values()
    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(weights, x, y).jaxpr
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            summed = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
            shape = eqn.outvars[0].aval.shape
            is_gradient = contracted == (0,)  # Of the rows.
            found.append((2 * summed * math.prod(shape), shape, is_gradient))
    return found


def event_seconds(tasks: Sequence[_Task], link: float) -> float:
    """Seconds of a step, by a queue of events of one processor and one link."""
    events: list[tuple[float, int, str]] = []
    clock, sent, index, queue, busy = 0.0, 0.0, 0, [], False
    heapq.heappush(events, (0.0, 0, "compute"))
    while events:
        clock, number, kind = heapq.heappop(events)
        if kind == "done":
            if tasks[number].sends:
                queue.append(number)
            if not tasks[number].sends or not tasks[number].waited:
                heapq.heappush(events, (clock, number, "compute"))
        if kind == "sent":
            busy, sent = False, clock
            if tasks[number].waited:
                heapq.heappush(events, (clock, number, "compute"))
        if kind == "compute" and index < len(tasks):
            end = clock + tasks[index].flops / _FLOPS
            heapq.heappush(events, (end, index, "done"))
            index += 1
        if queue and not busy:
            number, busy = queue.pop(0), True
            end = clock + tasks[number].sends / link
            heapq.heappush(events, (end, number, "sent"))
    return max(clock, sent)


def _ring(size: float, devices: int) -> float:
    """Bytes that a device sends in an all_reduce."""
    return 2 * (devices - 1) / devices * size


def data_parallel_tasks(widths: tuple[int, ...], devices: int) -> list[_Task]:
    """Every gradient is summed beside the rest of the backward pass."""
    tasks = [
        _Task(
            flops / devices,
            _ring(4 * math.prod(shape), devices) if is_gradient else 0.0,
            False,
        )
        for flops, shape, is_gradient in _matmuls(widths)
    ]
    loss = _Task(0.0, _ring(4, devices), True)  # One number, which is divided.
    forward = len(widths) - 1
    return [*tasks[:forward], loss, *tasks[forward:]]


def megatron_tasks(widths: tuple[int, ...], devices: int) -> list[_Task]:
    """Columns, then rows: the outputs of every second matmul are summed."""
    tasks, rows_split, forward = [], False, len(widths) - 1
    for index, (flops, shape, is_gradient) in enumerate(_matmuls(widths)):
        if index < forward:
            rows_split = index % 2 == 1
        elif not is_gradient:
            # Back through columns: a sum, of which each device has a part.
            layer = next(i for i, w in enumerate(widths) if w == shape[1])
            rows_split = layer % 2 == 0
        is_summed = rows_split and not is_gradient
        sends = _ring(4 * math.prod(shape), devices) if is_summed else 0.0
        tasks.append(_Task(flops / devices, sends, True))
    return tasks


def simulated(widths: tuple[int, ...], link: float, axis: str) -> Cost:
    """The simulator's cost of data parallelism, or of columns and rows by turns."""
    made = strategies(widths, link, {axis: _DEVICES})
    state = made.choices.data_parallel
    if axis == "tensor":
        names = [(None, axis), (axis, None)]
        state = tuple(
            choice.options.index(names[index % 2])
            for index, choice in enumerate(made.choices.all)
        )
    return made.cost(state)


def event_claim() -> Claim:
    """Whether the simulator's step takes as long as in an event loop."""
    worst, count = 0.0, 0
    for link in _LINKS:
        for widths in ((32, 128, 64), (16, 64, 32, 128, 8), (24, 48, 96, 192, 384)):
            for axis, tasks in (
                ("data", data_parallel_tasks),
                ("tensor", megatron_tasks),
            ):
                wanted = event_seconds(tasks(widths, _DEVICES), link)
                found = simulated(widths, link, axis).seconds.total
                worst, count = max(worst, abs(found / wanted - 1)), count + 1
    return Claim(
        f"{count} simulated steps take as long as in an event loop, to 1e-6",
        "tasks start when their inputs and their device are free (section 5.2)",
        f"{worst:.1e} off",
        worst < _EQUAL,
    )


def compiled(text: str) -> tuple[float, float]:
    """Bytes that a device sends per step: (simulated, in the compiled program)."""
    model, batch = chain(_WIDTHS), _batch(_WIDTHS)
    devices = jax.devices()[:_DEVICES]
    found = flexflow.search(model, _ADAM, batch, devices, require=text)
    program = meshpar.lower(model, _ADAM, found.layout, batch, devices=devices)
    axes = {axis: program.mesh.shape[axis] for axis in AXES}
    sent = sum(wires.sent(program.compiled.as_text(), axes).values())
    return found.fitting[0].seconds.wire_bytes, sent


def compiled_claims(found: Mapping[str, tuple[float, float]]) -> list[Claim]:
    """Whether bytes are those of compiled programs, and in their order.

    Args:
      found: {layout: (simulated, compiled)}.
    """
    # The loss and a norm are numbers more.
    off = max(abs(a - b) / b for a, b in found.values())
    order = sorted(found, key=lambda text: found[text][0])
    return [
        Claim(
            f"bytes that {len(found)} compiled layouts send, within 3%",
            "simulated times are within 30% of real ones (section 8.3)",
            f"at most {off:.1%} off",
            off < 0.03,
        ),
        Claim(
            "layouts come in the order of their compiled bytes",
            "the simulator preserves the ordering (section 8.3)",
            ", ".join(f"{found[text][1] / 1e3:.1f}" for text in order) + " kB",
            order == sorted(found, key=lambda text: found[text][1]),
        ),
    ]


def gains() -> dict[float, float]:
    """{bytes per second of links: data parallelism's time over that of the best}."""
    found = {}
    for link in (1e6, 1e7, 1e8, 1e9, 1e10, 1e12):
        best = min(searched("3 matmuls", s, link, 0).found for _, s in MESHES[:2])
        widths = CHAINS["3 matmuls"]
        plain = simulated(widths, link, "data").seconds.total
        found[link] = plain / min(plain, best)
    return found


def _run(setting: Setting) -> Result:
    setting.progress("searches", 0.0)
    meshes = MESHES[:2] if setting.quick else MESHES
    claims = search_claims(setting.seeds, meshes)
    setting.progress("simulates", 0.5)
    claims.append(event_claim())
    ratios = gains()
    widest = max(ratios.values())
    claims.append(
        Claim(
            "found layouts over data parallelism, over the speed of the links",
            "1.2 to 3.8 times the throughput of data and model parallelism",
            f"{min(ratios.values()):.1f} to {widest:.1f} times",
            1 <= min(ratios.values()) < 1.1 and widest > 1.2,
        )
    )
    sent = {}
    for index, text in enumerate(LAYOUTS[:3] if setting.quick else LAYOUTS):
        setting.progress(f"compiles {text}", 0.6 + 0.08 * index)
        sent[text] = compiled(text)
    claims += compiled_claims(sent)

    def draw(figure: matplotlib.figure.Figure) -> None:
        left, right = figure.subplots(1, 2)
        left.semilogx([x / 1e9 for x in ratios], list(ratios.values()), "o-")
        left.set(xlabel="GB/s of a link", ylim=0)
        left.set_ylabel("simulated speed over data parallelism")
        names = [f"{i + 1}" for i in range(len(sent))]
        places = np.arange(len(names))
        for offset, index, label in ((-0.2, 0, "simulated"), (0.2, 1, "compiled")):
            values = [pair[index] / 1e3 for pair in sent.values()]
            right.bar(places + offset, values, 0.4, label=label)
        right.set(xticks=places, xticklabels=names, xlabel="layout")
        right.set_ylabel("kB that a device sends per step")
        right.legend()

    rows = [
        (str(i + 1), text, f"{a / 1e3:.2f}", f"{b / 1e3:.2f}")
        for i, (text, (a, b)) in enumerate(sent.items())
    ]
    return Result(
        ("", "layout", "simulated kB", "compiled kB"),
        tuple(rows),
        tuple(claims),
        {"gain": ratios, "bytes": sent},
        draw,
    )


PAPER = Paper(
    name="flexflow",
    title="FlexFlow: a search over the layouts of operators",
    source="Jia, Zaharia, Aiken, MLSys 2019, arXiv:1807.05358, sections 5 to 8",
    shows="simulated speed of the layouts that the search finds over that of data "
    "parallelism, and bytes that a device sends, simulated and compiled",
    run=_run,
)
