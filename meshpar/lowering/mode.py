"""Optimizer modes: training that is more than one lowered step repeated.

A mode, such as `meshpar.LocalSGD`, makes a program of its own from the lowering of one
training step.
"""

from typing import Protocol

from meshpar.layouts.layout import Layout


class Mode(Protocol):
    """The part of an optimizer mode that `lower` and checkpoints use."""

    def reason_unsupported(
        self,
        layout: Layout,
        lowering_name: str,
        *,
        asynchronous: bool = False,
        reorders_layers: bool = False,
    ) -> str:
        """Says why the mode cannot train under a layout; "" if it can.

        Args:
          layout: the layout.
          lowering_name: the option `lowering` of `lower`: "", "auto", "jit" or
            "shard_map".
          asynchronous: whether the pipeline's stages update their weights at
            different times (PipeDream).
          reorders_layers: whether the pipeline stores its layers in another order than
            the model.
        """

    def identity(self) -> str:
        """The mode as text; checkpoints compare it before they reuse its state."""
