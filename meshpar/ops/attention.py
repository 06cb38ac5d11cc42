"""Causal attention under the layout in use, whichever axes split its arrays."""

from meshpar.ops.context.attention import attention as causal_attention

__all__ = ["causal_attention"]
