"""Mistakes in programs: layouts, plans, pipelines, experts and generation."""

from support.planted_papers import Mistake

MISTAKES: list[Mistake] = []
