"""Long sequences: positions and attention where `context` splits the length."""

from meshpar.ops.context.attention import attention as attention
from meshpar.ops.context.positions import positions as positions
