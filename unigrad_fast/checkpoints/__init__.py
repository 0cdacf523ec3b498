"""Weights on disk: the checkpoint format, reading and exporting checkpoints, importing the authors' files.

`training/checkpoint.py` decides what a checkpoint of a run holds.
"""
