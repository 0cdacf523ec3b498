"""What every command imports, imported once by the process that `command_process.py` forks the commands from."""

import nvidia.dali.fn
import nvidia.dali.pipeline  # noqa: F401

import unigrad_fast.evaluation.command
import unigrad_fast.evaluation.export
import unigrad_fast.training.trainer  # noqa: F401
from unigrad_fast.training.deepspeed_import import quiet_deepspeed

quiet_deepspeed()
