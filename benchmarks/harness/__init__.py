"""Shared parts of the benchmarks: taking turns, ratios, rows with their machine, memory, processes, images, tables."""
