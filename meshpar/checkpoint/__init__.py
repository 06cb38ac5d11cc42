"""Checkpoints that restore onto any layout and any number of processes."""

from meshpar.checkpoint.checkpoints import Checkpoints as Checkpoints
from meshpar.checkpoint.checkpoints import Restored as Restored
from meshpar.checkpoint.checksums import changed_tensor as changed_tensor
from meshpar.checkpoint.persistent import StoredCheckpoint as StoredCheckpoint
from meshpar.checkpoint.persistent import find_checkpoints as find_checkpoints
from meshpar.checkpoint.persistent import read_checkpoint as read_checkpoint
from meshpar.checkpoint.persistent import reason_not_restorable as reason_not_restorable
from meshpar.checkpoint.tier import Tier as Tier
from meshpar.checkpoint.weights import read_params as read_params
from meshpar.checkpoint.weights import read_weights as read_weights
