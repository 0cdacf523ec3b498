"""What the benchmarks share: turns and ratios, rows with their machine, memory, processes, images, tables."""
