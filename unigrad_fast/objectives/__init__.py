"""Objectives: `UniGrad`, and `build` to get one by name."""

from .unigrad import Mix, ObjectiveOutput, UniGrad, build

__all__ = ["Mix", "ObjectiveOutput", "UniGrad", "build"]
