"""Training runs with meshpar: commands, recipes, models, data and benchmarks."""
