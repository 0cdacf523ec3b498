"""Objectives: `UniGrad`, and `build` to get one by name."""

from .layout import Mix
from .output import ObjectiveOutput
from .unigrad import UniGrad, build

__all__ = ["Mix", "ObjectiveOutput", "UniGrad", "build"]
