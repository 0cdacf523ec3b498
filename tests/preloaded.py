"""What every command imports, imported once by the process that `command_process.py` forks the commands from."""

import nvidia.dali.fn
import nvidia.dali.pipeline  # noqa: F401

import unigrad_fast.checkpoints.export
import unigrad_fast.evaluation.knn_run
import unigrad_fast.evaluation.linear_run
import unigrad_fast.training.loop
import unigrad_fast.training.telemetry.curves  # noqa: F401
from unigrad_fast.runtime.quiet import quiet_deepspeed

quiet_deepspeed()
