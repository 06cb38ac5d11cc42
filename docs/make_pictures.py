"""Draws the pictures of the docs, beside this file.

    python docs/make_pictures.py [NAME ...]

Needs matplotlib (`pip install -e ".[experiments]"`).
"""

import functools
import itertools
import pathlib
import re
import sys

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import colors, patches, pyplot

import meshpar
from experiments import stragglers
from experiments.reports import islands
from meshpar.commands.reports import pictures as explained
from meshpar.explain.report import Explanation
from meshpar.islands import SSP, updates
from meshpar.layouts.token_order import CONTIGUOUS, STRIPED, ZIGZAG, device_order
from meshpar.runs.time_lines import time_lines

DATA, FSDP, TENSOR = "#c2571a", "#1f6fb4", "#2e8b57"
INK, FAINT = "#222222", "#e3e6ea"
MOVES = (
    (FSDP, "fsdp", "all-gather of weights", "each layer, forward and backward"),
    (FSDP, "fsdp", "reduce-scatter of gradients", "each layer, going backward"),
    (DATA, "data", "all-reduce of gradients", "once a step"),
    (TENSOR, "tensor", "gathers and sums of activations", "inside each layer"),
)


def _rectangle(axes, x, y, width, height, color, edge="white", line=1.0):
    box = patches.Rectangle(
        (x, y), width, height, facecolor=color, edgecolor=edge, linewidth=line
    )
    axes.add_patch(box)


def _device(axes, x, y, data, fsdp, tensor):
    """One device: its rows of the batch, and its block of a weight W[embed, mlp]."""
    _rectangle(axes, x, y, 1.9, 1.5, "white", INK)
    number = 4 * data + 2 * fsdp + tensor
    axes.text(x + 0.1, y + 1.36, f"{number}", fontsize=9, color=INK, va="top")
    for part in range(4):
        mine = part == 2 * data + fsdp
        color = DATA if mine else FAINT
        _rectangle(axes, x + 0.35, y + 0.9 - 0.22 * part, 0.42, 0.22, color)
    for row, column in itertools.product(range(2), range(2)):
        mine = (row, column) == (fsdp, tensor)
        color = FSDP if mine else FAINT
        left, bottom = x + 0.98 + 0.4 * column, y + 0.68 - 0.44 * row
        _rectangle(axes, left, bottom, 0.4, 0.44, color)


def _mesh(axes):
    """Two groups of 2 x 2 devices; a label for every coordinate."""
    label = dict(fontsize=10, ha="center", va="center")
    for data in range(2):
        left = 3.9 + 4.75 * data
        axes.text(left + 2.05, 4.5, f"data {data}", color=DATA, **label)
        for fsdp, tensor in itertools.product(range(2), range(2)):
            _device(axes, left + 2.2 * tensor, 2.2 - 1.8 * fsdp, data, fsdp, tensor)
        for tensor in range(2):
            x = left + 0.95 + 2.2 * tensor
            axes.text(x, 3.95, f"tensor {tensor}", color=TENSOR, **label)
    for fsdp in range(2):
        axes.text(3.3, 2.95 - 1.8 * fsdp, f"fsdp {fsdp}", color=FSDP, **label)


def _legend(axes):
    entries = (
        (3.9, DATA, "its rows of the batch"),
        (7.9, FSDP, "its block of a weight [embed, mlp], gradient, optimizer state"),
    )
    for x, color, text in entries:
        _rectangle(axes, x, -0.5, 0.3, 0.22, color)
        axes.text(x + 0.45, -0.39, text, fontsize=9.5, color=INK, va="center")


def _moves(axes):
    for row, (color, axis, move, when) in enumerate(MOVES):
        y = 3.75 - 1.05 * row
        axes.text(14.4, y, axis, color=color, fontsize=11, weight="bold")
        axes.text(15.85, y, move, fontsize=11, color=INK)
        axes.text(15.85, y - 0.4, when, fontsize=9.5, color="#555555")


def layout_figure() -> pyplot.Figure:
    """The picture of the layout data=2,fsdp=2,tensor=2 on eight devices."""
    figure, axes = pyplot.subplots(figsize=(13, 4.2))
    axes.set(xlim=(-0.2, 20.4), ylim=(-0.75, 5.7))
    axes.axis("off")
    title = dict(fontsize=12, color=INK, weight="bold")
    axes.text(0, 5.2, "a layout", **title)
    axes.text(3.9, 5.2, "the mesh, and what each device holds", **title)
    axes.text(14.4, 5.2, "what moves in a step", **title)
    code = dict(fontsize=14, family="monospace")
    axes.text(0, 3.3, "data=2,", color=DATA, **code)
    axes.text(0, 2.65, "fsdp=2,", color=FSDP, **code)
    axes.text(0, 2.0, "tensor=2", color=TENSOR, **code)
    for x in (2.25, 13.1):
        arrow = dict(arrowstyle="->", color="#888888", linewidth=1.5)
        axes.annotate("", (x + 0.75, 5.3), (x, 5.3), arrowprops=arrow)
    _mesh(axes)
    _legend(axes)
    _moves(axes)
    return figure


def token_orders_figure(num: int = 4, length: int = 32) -> pyplot.Figure:
    """Which device computes which score of causal attention, by order of tokens."""
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 4.1))
    palette = colors.ListedColormap([FAINT, DATA, FSDP, TENSOR, "#7d4fa3"])
    for ax, order in zip(axes, (CONTIGUOUS, ZIGZAG, STRIPED), strict=True):
        places = device_order(order, length, num).reshape(num, -1)
        device = np.zeros(length, int)
        for number, own in enumerate(places, start=1):
            device[own] = number
        scores = np.tril(np.ones((length, length), int)) * device[:, None]
        ax.imshow(scores, cmap=palette, vmin=0, vmax=num)
        work = np.bincount(scores.ravel(), minlength=num + 1)[1:]
        share = f"busiest device: {work.max() / work.mean():.2f} of the mean"
        ax.set_title(f"{order}\n{share}", fontsize=11, color=INK)
        ax.set(xticks=[], yticks=[], xlabel="keys", ylabel="queries")
    return figure


def experts_figure(num: int = 4, tokens: int = 12, capacity: int = 4) -> pyplot.Figure:
    """Tokens before and after the exchange that brings them to their experts."""
    figure, axes = pyplot.subplots(figsize=(11, 2.9))
    axes.set(xlim=(-2.2, 34), ylim=(-0.2, num + 0.6))
    axes.axis("off")
    hues, width, left = (DATA, FSDP, TENSOR, "#7d4fa3"), 0.8, 17.5
    title = dict(fontsize=11, color=INK, weight="bold")
    axes.text(0, num + 0.1, "tokens, in the color of their expert", **title)
    slots = f"experts, with {capacity} slots for each sequence"
    axes.text(left, num + 0.1, slots, **title)
    arrow = dict(arrowstyle="->", color="#888888", linewidth=1.5)
    axes.annotate("", (left - 1, 1.9), (left - 4.6, 1.9), arrowprops=arrow)
    axes.text(left - 4.7, 2.2, "all_to_all", fontsize=10, color=INK)
    shares = 0.37, 0.3, 0.2, 0.13
    chosen = np.random.default_rng(3).choice(num, (num, tokens), p=shares)
    for device, experts in enumerate(chosen):
        y, used = num - 1 - device, np.zeros(num, int)
        axes.text(-2.2, y + 0.25, f"device {device}", fontsize=9, color=INK)
        start = left + device * (capacity + 0.6) * width
        for expert in range(num):
            row = num - 1 - expert
            _rectangle(axes, start, row, capacity * width, 0.7, FAINT)
        for place, expert in enumerate(experts):
            is_kept, hue = used[expert] < capacity, hues[expert]
            color = hue if is_kept else "white"
            x = (place + 0.1) * width * 1.25
            _rectangle(axes, x, y, 0.9 * width * 1.25, 0.7, color, hue, 1.2)
            if is_kept:
                x = start + used[expert] * width
                _rectangle(axes, x, num - 1 - expert, width, 0.7, hue)
            used[expert] += 1
    return figure


def islands_sweep_figure() -> pyplot.Figure:
    """Loss and waiting under consistency models, with stragglers (a minute)."""
    results = (stragglers.sweep(kind, 8, 30.0) for kind in stragglers.STRAGGLERS)
    return islands.curves(list(itertools.chain(*results)))


def time_lines_figure() -> pyplot.Figure:
    """Draws three islands under SSP(1), one of which is slow."""
    update = updates.sgd(0.05)
    found = stragglers.simulate(SSP(1), "permanent", update, workers=3, seconds=6.0)
    return time_lines(found.spans)


@functools.cache
def layout_steps() -> list[Explanation]:
    """The explanations of the four layouts of layout_steps.md, by its own programs."""
    meshpar.simulate(8)
    page = pathlib.Path(__file__).with_name("layout_steps.md").read_text()
    first, *steps, _ = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    scope = {"__name__": "layout_steps"}
    for program in (first, *steps):
        exec(program, scope)
    return [scope[name] for name in ("data", "fsdp", "tensor", "pipe")]


def main() -> None:
    """Writes the pictures beside this file."""
    pictures = {
        "layout_steps_mesh": lambda: explained.mesh_figure(layout_steps()[2]),
        "layout_steps_memory": lambda: explained.memory_figure(layout_steps()),
        "layout_steps_traffic": lambda: explained.traffic_figure(layout_steps()),
        "layout": layout_figure,
        "token_orders": token_orders_figure,
        "experts": experts_figure,
        "islands_sweep": islands_sweep_figure,
        "time_lines": time_lines_figure,
    }
    for name in sys.argv[1:] or pictures:
        draw = pictures[name]
        path = pathlib.Path(__file__).with_name(f"{name}.png")
        draw().savefig(path, dpi=110, facecolor="white", bbox_inches="tight")


if __name__ == "__main__":
    main()
