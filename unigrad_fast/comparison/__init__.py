"""Comparisons: the paper's tables, or any grid of settings, from runs that differ in nothing else."""
