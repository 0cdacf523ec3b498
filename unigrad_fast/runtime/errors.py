"""Errors that the command line turns into an exit status and one message, without a traceback."""

from unigrad_fast.pipelines.errors import DataError

__all__ = ["DataError", "Preempted", "RunStopped", "UserError"]


class UserError(Exception):
    """The user's input is wrong (exit status 2); the message names the value and the remedy."""


class RunStopped(Exception):
    """The run ended itself, say after non-finite values (exit status 3); the message says why."""


class Preempted(Exception):
    """The run was asked to leave, and saved its state (exit status 75); the message says where."""
