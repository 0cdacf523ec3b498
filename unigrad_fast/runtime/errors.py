"""Errors that the command line turns into one message and an exit status, without a traceback."""

from pathlib import Path

from unigrad_fast.pipelines.errors import DataError

INTERRUPTED = 130  # the shells' status after Ctrl-C, so that their loops end too
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again

__all__ = ["INTERRUPTED", "PREEMPTED", "DataError", "Preempted", "RankLost", "RunStopped", "StopRun", "UserError"]


class UserError(Exception):
    """The user's input is wrong (exit status 2); the message names the value and the remedy."""


class RunStopped(Exception):
    """The run stopped itself, for example after non-finite values (exit status 3); the message says why."""


class RankLost(RunStopped):
    """Another rank died, hangs or cannot be reached; the message names it."""


class Preempted(Exception):
    """The run was asked to exit and saved its state; the message says after which step.

    Args:
        status: PREEMPTED, or INTERRUPTED after Ctrl-C.
        run: the run's folder; None if there is none yet.
    """

    def __init__(self, message: str, status: int = PREEMPTED, run: Path | None = None) -> None:
        super().__init__(message)
        self.status, self.run = status, run


class StopRun(Exception):
    """Raised by a callback of `pretrain`: the run saves, and ends well."""
