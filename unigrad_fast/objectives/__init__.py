"""Objectives: `UniGrad`, and `build` to get one by name."""

from .unigrad import ObjectiveOutput, UniGrad, build

__all__ = ["ObjectiveOutput", "UniGrad", "build"]
