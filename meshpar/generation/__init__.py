"""Generation: prompts are continued under the layouts of training, with a cache."""

from meshpar.generation.flax_cache import linen_cache as linen_cache
from meshpar.generation.flax_cache import nnx_cache as nnx_cache
from meshpar.generation.generate import Generator as Generator
from meshpar.generation.make import generator as generator
from meshpar.generation.prompts import unpadded as unpadded
from meshpar.generation.sampling import GREEDY as GREEDY
from meshpar.generation.sampling import Sampling as Sampling
from meshpar.models.cached import CachedModel as CachedModel
