"""Training runs with meshpar: commands, recipes, models, data and benchmarks.

Packages, each importing only those to its left: data and models | recipes | training,
interchange and reports | command_line | commands and benchmarks. The command supervise
and its package supervision import no others and need no jax.
"""
