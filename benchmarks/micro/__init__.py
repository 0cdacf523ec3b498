"""Micro-benchmarks, `test_*.py`, and their comparison with another commit. Run in a checkout; not in the wheel."""
