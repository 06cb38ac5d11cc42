"""Pipeline parallelism: one executor for every schedule."""
