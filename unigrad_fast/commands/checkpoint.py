"""`unigrad-fast checkpoint show` and `verify`."""

from __future__ import annotations

from unigrad_fast.runtime.validation import AbsolutePath, Node


class CheckpointShow(Node):
    """Show the content of a checkpoint."""

    path: AbsolutePath
    """A run folder (shows its newest checkpoint), or the folder of one checkpoint."""


def checkpoint_show(options: CheckpointShow) -> None:
    from unigrad_fast.checkpoints import report

    report.show(options.path)


class CheckpointVerify(Node):
    """Compare a checkpoint's files with their digests."""

    path: AbsolutePath
    """A run folder (verifies all its checkpoints), or the folder of one checkpoint."""


def checkpoint_verify(options: CheckpointVerify) -> None:
    from unigrad_fast.checkpoints import report

    report.verify(options.path)
