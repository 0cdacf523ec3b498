"""What `engine.compile` needs."""

from __future__ import annotations

import os
import shutil

from unigrad_fast.config import Config
from unigrad_fast.runtime.errors import UserError


def require(config: Config, ranks: int) -> None:
    """Raises UserError where the networks cannot be compiled."""
    config.check_world(ranks)
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise UserError(
            f"engine.compile = true: there is no C++ compiler {compiler}; install one, name yours in CXX, or leave "
            "engine.compile out"
        )
