"""Communication patterns as named functions, to be called inside shard_map."""

from meshpar.collectives.compression import Compression as Compression
from meshpar.collectives.compression import make_compression as make_compression
from meshpar.collectives.microbatch import split_microbatches as split_microbatches
from meshpar.collectives.patterns import all_gather as all_gather
from meshpar.collectives.patterns import all_reduce as all_reduce
from meshpar.collectives.patterns import all_to_all as all_to_all
from meshpar.collectives.patterns import barrier as barrier
from meshpar.collectives.patterns import broadcast as broadcast
from meshpar.collectives.patterns import gather as gather
from meshpar.collectives.patterns import pull as pull
from meshpar.collectives.patterns import push as push
from meshpar.collectives.patterns import reduce as reduce
from meshpar.collectives.patterns import reduce_scatter as reduce_scatter
from meshpar.collectives.patterns import scatter as scatter
from meshpar.collectives.patterns import send as send
from meshpar.collectives.patterns import wait as wait
from meshpar.collectives.rings import ring_all_gather as ring_all_gather
from meshpar.collectives.rings import ring_all_reduce as ring_all_reduce
from meshpar.collectives.rings import ring_reduce_scatter as ring_reduce_scatter
from meshpar.collectives.rings import torus_all_gather as torus_all_gather
from meshpar.collectives.rings import torus_reduce_scatter as torus_reduce_scatter
from meshpar.collectives.rings import tree_all_reduce as tree_all_reduce
from meshpar.collectives.rings import tree_broadcast as tree_broadcast
from meshpar.collectives.shard_keys import for_microbatch as for_microbatch
from meshpar.collectives.shard_keys import for_shard as for_shard
