"""Counts instead of measurements: FLOPs and bytes of the kernels, a step without a GPU, compiled kernels."""
