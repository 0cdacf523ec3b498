"""Draws with matplotlib's own defaults: how somebody shows figures elsewhere does not matter here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from unittest import mock

from unigrad_fast.runtime.quiet import without_warnings


@contextmanager
def plotting() -> Iterator[None]:
    """Inside, matplotlib can be imported whatever MPLBACKEND says, and no matplotlibrc or style applies.

    The caller chooses the canvas, so no backend is ever used.
    """
    backend = os.environ.get("MPLBACKEND") if "matplotlib" not in sys.modules else None
    with mock.patch.dict(os.environ), without_warnings():
        os.environ.pop("MPLBACKEND", None)  # a notebook's, say, that is not installed here
        import matplotlib
    if backend:
        with suppress(ValueError):
            matplotlib.rcParams["backend"] = backend  # which the caller's own figures use
    own = {key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"}
    with without_warnings(), matplotlib.rc_context(own):
        yield
