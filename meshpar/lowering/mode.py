"""Optimizer modes: training that is more than one lowered step repeated.

A mode, such as `meshpar.LocalSGD`, makes a program of its own from the lowering of one
training step.
"""

from typing import Protocol

from meshpar.layouts.refusals.combination import ModeTraits


class Mode(Protocol):
    """The part of an optimizer mode that `lower` and checkpoints use."""

    @property
    def traits(self) -> ModeTraits:
        """Facts of the mode at which the table of refusals looks."""

    def identity(self) -> str:
        """The mode as text; checkpoints compare it before they reuse its state."""
