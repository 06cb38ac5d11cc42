"""meshpar: train any Flax model under any parallel layout with JAX SPMD."""

from meshpar import layouts as layouts
from meshpar.errors import LayoutError as LayoutError
from meshpar.errors import MeshparError as MeshparError
from meshpar.errors import StalenessError as StalenessError
from meshpar.flax_models import Model as Model
from meshpar.flax_models import Param as Param
from meshpar.flax_models import from_linen as from_linen
from meshpar.flax_models import from_nnx as from_nnx
from meshpar.gossip import Gossip as Gossip
from meshpar.layouts import Layout as Layout
from meshpar.local_sgd import LocalSGD as LocalSGD
from meshpar.local_sgd import warm_up as warm_up
from meshpar.lowering import TrainState as TrainState
from meshpar.merges import Elastic as Elastic
from meshpar.merges import Lerp as Lerp
from meshpar.merges import Overwrite as Overwrite
from meshpar.merges import Shift as Shift
from meshpar.mesh import make_mesh as make_mesh
from meshpar.mesh import simulate as simulate
from meshpar.plan import Plan as Plan
from meshpar.program import TrainProgram as TrainProgram
from meshpar.staged import Stages as Stages
from meshpar.train_step import lower as lower
