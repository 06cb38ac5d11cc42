"""Flax models as pure functions over {path: array}, from NNX and from Linen."""

from meshpar.models.cached import CachedModel as CachedModel
from meshpar.models.layer_stack import LayeredModel as LayeredModel
from meshpar.models.layer_stack import LayerStack as LayerStack
from meshpar.models.linen import from_linen as from_linen
from meshpar.models.model import Model as Model
from meshpar.models.nnx import from_nnx as from_nnx
