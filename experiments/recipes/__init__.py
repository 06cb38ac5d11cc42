"""Recipes: a function per run that returns its whole configuration (`--recipe`)."""

from experiments.recipes.catalog import CATALOG as CATALOG
from experiments.recipes.catalog import RECIPES as RECIPES
from experiments.recipes.catalog import get as get
from experiments.recipes.catalog import of_decoder as of_decoder
from experiments.recipes.catalog import stored as stored
from experiments.recipes.small import tiny as tiny
