"""The axes of a device mesh: what each one splits, and where it may lie."""

AXES = ("replica", "pipe", "data", "fsdp", "tensor")
"""Mesh axes, outer (slowest link) to inner. `data` replicates, `fsdp` shards.

Along `replica` whole models may differ for a while (local SGD).
"""

BATCH_AXES = ("data", "fsdp")
"""The axes over which a batch is split, each replica's part of it on its own."""

SLOW_AXES = ("replica", "pipe", "data")
"""The axes that may cross links between slices (DCN); all others stay within one."""
