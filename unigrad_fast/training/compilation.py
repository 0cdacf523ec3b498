"""Requirements of `engine.compile`."""

from __future__ import annotations

import os
import shutil

from unigrad_fast.config import Config
from unigrad_fast.runtime.errors import UserError


def require(config: Config, ranks: int) -> None:
    """Raises UserError if the networks cannot be compiled."""
    config.check_world(ranks)
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise UserError(
            f"engine.compile = true: C++ compiler {compiler} not found; install one, name yours in CXX, or omit "
            "engine.compile"
        )
