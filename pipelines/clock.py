"""A clock for time-outs that notices when the process did not run.

A process may be suspended (Ctrl-Z, `docker pause`, `scontrol suspend`), or its whole machine may be. Meanwhile the
monotonic clock runs, but neither storage nor another rank kept anybody waiting. So whoever waits looks at the clock at
least every BEAT seconds. A gap between two looks shows that the process did not run, and then every wait begins anew.
"""

import time

BEAT = 0.25  # seconds
GAP = 1.0  # seconds between two looks that show that the process did not run

_looked = _resumed = float("-inf")  # the last look, and the first one after the last gap


def now() -> float:
    """Seconds of the monotonic clock."""
    global _looked, _resumed
    moment = time.monotonic()
    if moment - _looked > GAP:
        _resumed = moment
    _looked = moment
    return moment


def since(began: float) -> float:
    """Seconds since then, or since the process resumed if that was later."""
    moment = now()
    return moment - max(began, _resumed)
