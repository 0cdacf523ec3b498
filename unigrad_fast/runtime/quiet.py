"""Silences what libraries print that users cannot act on. Imports at its top nothing that may be missing."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from types import ModuleType


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Inside, neither Python warnings nor log messages up to WARNING are shown."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _silent_compiler() -> Iterator[None]:
    """Inside, a notebook does not show what a compiler writes that DeepSpeed tries; elsewhere DeepSpeed sees to it."""
    from unigrad_fast.runtime.console import in_notebook

    if not in_notebook():
        yield
        return
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def quiet_deepspeed(verbose: bool = False) -> ModuleType:
    """Import DeepSpeed so that it needs no compiler and prints nothing but errors.

    Must come before any other import of DeepSpeed. Without a GPU, or if `process_group` chose the CPU, it selects
    DeepSpeed's CPU accelerator.

    Args:
        verbose: show its warnings, and its log from level INFO up.

    Returns:
        The module `deepspeed`.
    """
    import torch

    from unigrad_fast.runtime.torch_private import without_default_group

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    loud = contextlib.nullcontext()
    with loud if verbose else without_warnings(), loud if verbose else _silent_compiler(), without_default_group():
        import deepspeed
        import deepspeed.ops
        import torch.distributed.nn.functional  # which DeepSpeed imports later

        if os.environ.get("DS_ACCELERATOR") == "cpu":
            # Asking which operators could be compiled makes some of them print to stdout.
            with contextlib.nullcontext() if verbose else contextlib.redirect_stdout(io.StringIO()):
                compilable = deepspeed.ops.__compatible_ops__
            compilable["deepspeed_shm_comm"] = False  # compiling it takes 40 s and a compiler; gloo does its work
    if not verbose:  # otherwise every run at stages 1 and 2 warns about functions that torch renamed
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    logger = logging.getLogger("DeepSpeed")
    for each in (logger, *logger.handlers):
        each.setLevel(logging.INFO if verbose else logging.ERROR)
    return deepspeed
