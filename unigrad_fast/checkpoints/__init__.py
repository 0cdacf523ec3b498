"""Weights on disk: the format of checkpoints, reading and exporting them, the authors' files.

What a checkpoint of a run holds is decided in `training/checkpoint.py`.
"""
