"""Checks and times kernels, training step and data path on a GPU: `python -m unigrad_fast.benchmarks.device_check`."""
