"""Functions that models call and that follow the layout in use."""

from meshpar.ops import context as context
from meshpar.ops import experts as experts
from meshpar.ops import float8 as float8
from meshpar.ops import kernels as kernels
from meshpar.ops import tensor_parallel as tensor_parallel
from meshpar.ops import vocabulary as vocabulary
from meshpar.ops.layer_loop import over_layers as over_layers
