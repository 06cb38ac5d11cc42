"""Galvatron's decision trees: how many strategies there are, and what pruning loses."""

import itertools
import math

import matplotlib.figure

import meshpar
from experiments.gallery import wires, zero_r
from experiments.gallery.paper import Claim, Paper, Result, Setting
from meshpar.layouts.axes import AXES
from meshpar.methods import decision_tree

_DEVICES, _MOST, _QUICK_MOST, _DEPTH = 8, 64, 16, 4
_PAPER = {False: 34, True: 22}
"""{pruned: strategies of 8 devices, as the paper counts them}."""


def counted(devices: int, prune: bool) -> int:
    """Strategies, by trying all orders of all kinds with all degrees."""
    degrees, count = [2**i for i in range(devices.bit_length())], 0
    for stages, size in itertools.product(degrees, range(4)):
        for order in itertools.permutations(("data", "sharded", "tensor"), size):
            if prune and {"data", "sharded"} <= set(order):
                continue
            for parts in itertools.product(degrees[1:], repeat=size):
                count += stages * math.prod(parts) == devices
    return count


def count_claims(most: int) -> list[Claim]:
    """Whether the trees have as many strategies as there are, and as the paper says."""
    found = {p: len(decision_tree.strategies(_DEVICES, p)) for p in (False, True)}
    sizes = [2**i for i in range(most.bit_length())]
    missed = [
        (devices, prune)
        for devices, prune in itertools.product(sizes, (False, True))
        if len(decision_tree.strategies(devices, prune)) != counted(devices, prune)
    ]
    layouts = [s.layout for s in decision_tree.strategies(_DEVICES)]
    return [
        Claim(
            f"strategies of {_DEVICES} devices, before and after pruning",
            "34, 22 (section 3.1)",
            f"{found[False]}, {found[True]}",
            found == _PAPER,
        ),
        Claim(
            f"the trees of up to {most} devices have what trying all has",
            "",
            f"in {2 * len(sizes) - len(missed)} of {2 * len(sizes)} cases",
            not missed,
        ),
        Claim(
            f"every strategy is a layout of {_DEVICES} devices; those that differ by "
            "the order alone are one",
            "",
            f"{len(set(map(str, layouts)))} layouts",
            all(x.num_devices == _DEVICES for x in layouts),
        ),
    ]


def measured(layout: str) -> tuple[float, float]:
    """(state, bytes sent per step) of a device, over all weights; as compiled."""
    step = zero_r.program(_DEPTH, layout)
    size = 4 * sum(math.prod(x.shape) for x in step.model.params.values())
    axes = {axis: step.mesh.shape[axis] for axis in AXES}
    sent = sum(wires.sent(step.compiled.as_text(), axes).values())
    return step.plan.bytes_per_device()["parameters"] / size, sent / size


def pruning_claims() -> tuple[list[Claim], dict[str, tuple[float, float]]]:
    """Whether mixing data and sharded data parallelism is never better."""
    names = "fsdp=8", "data=2,fsdp=4", "data=4,fsdp=2"
    found = {layout: measured(layout) for layout in names}
    alone = found[names[0]]

    def formula(layout: str) -> float:
        sizes = meshpar.layouts.parse(layout)
        n, m = sizes.fsdp, sizes.data
        return 3 * (n - 1) / n + 2 * (m - 1) / m / n

    off = max(abs(sent / formula(layout) - 1) for layout, (_, sent) in found.items())
    texts = ", ".join(f"{sent:.3f} ({layout})" for layout, (_, sent) in found.items())
    return [
        Claim(
            "weights on a device: mixing keeps more than sharding alone",
            "sharded data parallelism alone is better in memory (takeaway 3)",
            ", ".join(f"1/{1 / state:.0f}" for state, _ in found.values()),
            all(found[name][0] > alone[0] for name in names[1:]),
        ),
        Claim(
            "payloads sent are 3(n-1)/n + 2(m-1)/(m n), n sharded, m data, within 2%",
            "and in traffic, which does not hold here: gradients are summed over data "
            "as shards",
            texts,
            off < 0.02 and all(found[name][1] < alone[1] for name in names[1:]),
        ),
    ], found


def _run(setting: Setting) -> Result:
    most = _QUICK_MOST if setting.quick else _MOST
    claims = count_claims(most)
    setting.progress("compiles", 0.3)
    more, found = pruning_claims()
    claims += more
    sizes = [2**i for i in range(most.bit_length())]
    counts = {
        prune: [len(decision_tree.strategies(n, prune)) for n in sizes]
        for prune in (False, True)
    }

    def draw(figure: matplotlib.figure.Figure) -> None:
        axes = figure.subplots()
        for prune, label in ((False, "all"), (True, "pruned")):
            axes.plot(sizes, counts[prune], "o-", label=label)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="devices", ylabel="strategies of a layer", ylim=0)
        axes.legend()

    rows = [
        (str(n), str(a), str(b))
        for n, a, b in zip(sizes, counts[False], counts[True], strict=True)
    ]
    return Result(
        ("devices", "strategies", "pruned"),
        tuple(rows),
        tuple(claims),
        {
            "devices": sizes,
            "all": counts[False],
            "pruned": counts[True],
            "compiled": found,
        },
        draw,
    )


PAPER = Paper(
    name="decision_tree",
    title="Galvatron: decision trees of strategies",
    source="Miao et al., VLDB 2023, arXiv:2211.13878, section 3.1",
    shows="strategies of a layer over the number of devices, all of them and without "
    "branches that mix data and sharded data parallelism",
    run=_run,
)
