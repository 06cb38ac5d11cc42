"""meshpar: train Flax models under parallel layouts with JAX SPMD."""

from meshpar import collectives as collectives
from meshpar import generation as generation
from meshpar import islands as islands
from meshpar import layouts as layouts
from meshpar import local_sgd as local_sgd
from meshpar import mesh as mesh
from meshpar import schedules as schedules
from meshpar.compose import lower as lower
from meshpar.errors import LayoutError as LayoutError
from meshpar.errors import MeshparError as MeshparError
from meshpar.errors import StalenessError as StalenessError
from meshpar.explain.user_loop import verify as verify
from meshpar.generation import Generator as Generator
from meshpar.generation import Sampling as Sampling
from meshpar.generation import generator as generator
from meshpar.generation import linen_cache as linen_cache
from meshpar.generation import nnx_cache as nnx_cache
from meshpar.layouts import Layout as Layout
from meshpar.layouts import Param as Param
from meshpar.layouts import Plan as Plan
from meshpar.local_sgd import Elastic as Elastic
from meshpar.local_sgd import Gossip as Gossip
from meshpar.local_sgd import Lerp as Lerp
from meshpar.local_sgd import LocalSGD as LocalSGD
from meshpar.local_sgd import Overwrite as Overwrite
from meshpar.local_sgd import Shift as Shift
from meshpar.local_sgd import warm_up as warm_up
from meshpar.lowering.ema import with_ema as with_ema
from meshpar.lowering.metric_sums import MetricSums as MetricSums
from meshpar.lowering.state import TrainState as TrainState
from meshpar.lowering.train_program import TrainProgram as TrainProgram
from meshpar.mesh import make_mesh as make_mesh
from meshpar.mesh import simulate as simulate
from meshpar.methods.row_table import RowTable as RowTable
from meshpar.models import CachedModel as CachedModel
from meshpar.models import Last as Last
from meshpar.models import LayerStack as LayerStack
from meshpar.models import Max as Max
from meshpar.models import Mean as Mean
from meshpar.models import Model as Model
from meshpar.models import Sum as Sum
from meshpar.models import from_linen as from_linen
from meshpar.models import from_nnx as from_nnx
from meshpar.ops import tensor_parallel as tensor_parallel
from meshpar.ops import vocabulary as vocabulary
from meshpar.planner import Plans as Plans
from meshpar.planner import plan as plan

Stages = LayerStack
"""The former name of `LayerStack`."""
