"""Encoded images of each step, read ahead; what cannot be used is remembered and replaced by another image."""
