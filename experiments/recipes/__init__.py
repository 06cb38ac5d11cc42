"""Recipes: a function per run that returns its whole configuration (`--recipe`)."""

from experiments.recipes.catalog import RECIPES as RECIPES
from experiments.recipes.catalog import default_layout as default_layout
from experiments.recipes.catalog import get as get
from experiments.recipes.small import tiny as tiny
