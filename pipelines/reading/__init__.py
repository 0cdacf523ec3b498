"""Reads the encoded images of each step ahead; unusable images are remembered and replaced."""
