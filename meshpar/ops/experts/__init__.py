"""Mixtures of experts: routing, dispatch, grouped matmuls, statistics."""

from meshpar.ops.experts.balance import balanced as balanced
from meshpar.ops.experts.balance import balanced_bias as balanced_bias
from meshpar.ops.experts.capacity import run_with_capacity as run_with_capacity
from meshpar.ops.experts.config import Experts as Experts
from meshpar.ops.experts.config import MixtureConfig as MixtureConfig
from meshpar.ops.experts.dropless import run_dropless as run_dropless
from meshpar.ops.experts.exchange import Exchange as Exchange
from meshpar.ops.experts.grouped_matmul import grouped_matmul as grouped_matmul
from meshpar.ops.experts.mixture import Mixed as Mixed
from meshpar.ops.experts.mixture import mixture as mixture
from meshpar.ops.experts.router import Routing as Routing
from meshpar.ops.experts.router import route as route
from meshpar.ops.experts.statistics import DEVICE_LOAD as DEVICE_LOAD
from meshpar.ops.experts.statistics import Statistics as Statistics
