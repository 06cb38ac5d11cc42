"""Runs: the training loop, its data, checkpoints, metrics, guards and reports."""

from meshpar.runs.run import Run as Run
from meshpar.runs.train import Trained as Trained
from meshpar.runs.train import train as train
