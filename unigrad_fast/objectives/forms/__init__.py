"""Methods in gradient form: `ROWS`, the paper's table of methods, and the objective that computes a row."""

from .form import GradientForm
from .rows import GRADIENTS, ROWS, Row

__all__ = ["GRADIENTS", "ROWS", "GradientForm", "Row"]
