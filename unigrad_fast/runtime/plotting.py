"""Draws with matplotlib's own defaults: how somebody shows figures elsewhere does not matter here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from unigrad_fast.runtime.quiet import without_warnings


@contextmanager
def plotting() -> Iterator[None]:
    """Inside, matplotlib can be imported whatever MPLBACKEND says, and no matplotlibrc or style applies.

    The caller chooses the canvas, so no backend is ever used.
    """
    if "matplotlib" not in sys.modules and (backend := os.environ.pop("MPLBACKEND", None)):
        try:
            import matplotlib
        finally:
            os.environ["MPLBACKEND"] = backend
        with suppress(ValueError):  # a notebook's, say, that is not installed here
            matplotlib.rcParams["backend"] = backend
    import matplotlib

    own = {key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"}
    with without_warnings(), matplotlib.rc_context(own):
        yield
