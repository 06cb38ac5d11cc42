"""Local SGD with bounded staleness: replicas train separately and are averaged."""

from meshpar.local_sgd.gossip import Gossip as Gossip
from meshpar.local_sgd.merges import Elastic as Elastic
from meshpar.local_sgd.merges import Lerp as Lerp
from meshpar.local_sgd.merges import Overwrite as Overwrite
from meshpar.local_sgd.merges import Shift as Shift
from meshpar.local_sgd.mode import LocalSGD as LocalSGD
from meshpar.local_sgd.mode import warm_up as warm_up
