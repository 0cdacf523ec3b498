"""Objectives: `UniGrad`, the other methods, and `build` to get one by name."""

from .forms import ROWS, GradientForm, Row
from .layout import Mix
from .methods import build
from .output import ObjectiveOutput
from .unigrad import UniGrad

__all__ = ["ROWS", "GradientForm", "Mix", "ObjectiveOutput", "Row", "UniGrad", "build"]
