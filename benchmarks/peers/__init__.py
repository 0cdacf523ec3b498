"""Implementations to compare with: the authors' formulation, plain torch, torchvision."""
