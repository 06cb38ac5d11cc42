"""Device meshes: accelerators, simulated CPU devices and ahead-of-time topologies."""

from meshpar.mesh.mesh import make_mesh as make_mesh
from meshpar.mesh.mesh import simulate as simulate
from meshpar.mesh.topologies import topology as topology
