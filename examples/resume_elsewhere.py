"""A run that stops under one layout and goes on under another, in the same folder.

    python examples/resume_elsewhere.py runs/elsewhere

The checkpoint holds the model's own arrays: no layout is in it.
"""

import sys

import my_run

import meshpar


def train(folder, parts, settings=None):
    """Trains in parts, (layout, last step) each; returns the losses of all steps."""
    losses = []
    for layout, last in parts:
        run = my_run.my_run(**(settings or {}))
        done = meshpar.train(run, layout=layout, steps=last, workdir=folder)
        print(f"under {layout} up to step {last}")
        losses = [row["loss"] for row in done.metrics if "loss" in row]
    return losses


if __name__ == "__main__":
    meshpar.simulate(8)
    losses = train(sys.argv[1], [("data=4,fsdp=2", 20), ("pipe=4,data=2", 40)])
    print(*(f"{x:.4f}" for x in losses))
