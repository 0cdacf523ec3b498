"""What a run reports while it trains: progress on the console, metrics in files, warnings, a summary.

    RUN/metrics.jsonl   one JSON object per line, flushed at once; events `train`, `knn`, `warning` and `resumed`
    RUN/log.txt         what the console showed, with the time of day
    RUN/tensorboard/    the same numbers for TensorBoard
    RUN/summary.json    the final numbers
    RUN/curves.png      metrics.jsonl as a picture, and the same as curves.svg

A step is an optimizer step, and a step number counts completed steps: 0 is the untrained encoder, `total_steps` the
trained one.
"""

from unigrad_fast.training.telemetry.telemetry import Telemetry

__all__ = ["Telemetry"]
