"""What a caller from Python is told while a run trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

OnStep: TypeAlias = Callable[[int, Mapping[str, Any]], object]
OnEvaluation: TypeAlias = Callable[[int, Mapping[str, Any]], object]
OnCheckpoint: TypeAlias = Callable[[int, Path], object]


@dataclass(frozen=True)
class Callbacks:
    """Functions that rank 0 calls with a step, counted from 1, and what it brought.

    StopRun from one of them ends the run well, on all ranks, within two steps. Any other error ends it without saving.

    Attributes:
        on_step: the metrics of a reported step, as in metrics.jsonl; one step late, so that it does not wait.
        on_evaluation: the kNN accuracy and its settings; step 0 is the untrained encoder.
        on_checkpoint: the folder of a checkpoint.
    """

    on_step: OnStep | None = None
    on_evaluation: OnEvaluation | None = None
    on_checkpoint: OnCheckpoint | None = None
