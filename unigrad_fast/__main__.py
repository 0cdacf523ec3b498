"""`python -m unigrad_fast` is the command `unigrad-fast`."""

from __future__ import annotations

import signal
import sys

from unigrad_fast.runtime.errors import INTERRUPTED, PREEMPTED
from unigrad_fast.runtime.packages import complaint


def main() -> int:
    """The command, or one line where it cannot even be imported; returns the exit status."""
    try:
        from unigrad_fast import cli

        status = cli.main()
    except ModuleNotFoundError as error:
        if said := complaint(error.name or ""):
            print(f"error: {said}", file=sys.stderr)
            return 2
        raise
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    if status in (INTERRUPTED, PREEMPTED):
        # A launcher that saw another rank leave tells this one to end, which has saved and ends with its own status.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return status


if __name__ == "__main__":
    sys.exit(main())
