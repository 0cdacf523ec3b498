"""Evaluates an encoder: extracts its features for a manifest and measures how well they separate classes."""

from unigrad_fast.evaluation.features import extract
from unigrad_fast.evaluation.knn import KNNResult, weighted_knn

__all__ = ["KNNResult", "extract", "weighted_knn"]
