"""What an encoder has learned: its features on a manifest, and how well they tell classes apart."""

from unigrad_fast.evaluation.features import extract
from unigrad_fast.evaluation.knn import KNNResult, weighted_knn

__all__ = ["KNNResult", "extract", "weighted_knn"]
