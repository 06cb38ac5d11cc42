"""Fully sharded data parallelism (ZeRO-1, 2 and 3) inside shard_map."""
