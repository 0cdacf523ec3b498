"""Measurements of speed; installed as `unigrad_fast.benchmarks`."""
