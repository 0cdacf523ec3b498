"""Messages for out-of-memory errors, on the host or a GPU: what was being made, its size, and which keys help."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from unigrad_fast.runtime.errors import DataError, RunStopped, UserError
from unigrad_fast.runtime.wording import byte_size

# Messages of torch's allocators, CUDA and its libraries, NCCL, DALI and the C++ library.
SIGNS = re.compile(
    r"out of memory|can't allocate memory|not enough memory|unable to allocate|cannot allocate memory|ALLOC_FAILED|"
    r"bad_alloc|allocation failed|failed to allocate",
    re.IGNORECASE,
)
ASKED = re.compile(
    r"tried to allocate ([\d.]+) ?(bytes|[KMGT]iB)|allocate ([\d.]+) ([KMGTPE]iB|bytes) for an array", re.IGNORECASE
)
RAN_OUT = "memory ran out"  # a note on the explained error, for code that can add advice
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "EiB": 2**60}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out; False for errors that have been explained already."""
    if isinstance(error, DataError | RunStopped | UserError):
        return False
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(SIGNS.search(str(error))))


def asked_for(error: BaseException) -> str:
    """The size that could not be allocated, if the error names it."""
    match = ASKED.search(str(error))
    if match is None:
        return ""
    number, unit = (match[1], match[2]) if match[1] else (match[3], match[4])
    return f"; {byte_size(float(number) * UNITS[unit])} more could not be allocated"


@contextmanager
def memory_for(
    what: str,
    expected: float | Callable[[], float] | None,
    remedy: str,
    kind: type[Exception] = UserError,
    state: str | Callable[[], str] = "",
) -> Iterator[None]:
    """Turns an out-of-memory error into one message.

    Args:
        what: what is being allocated.
        expected: its size in bytes, or a function that computes it; None if unknown.
        remedy: what would need less memory.
        kind: type of the error to raise: UserError before the first step, RunStopped later.
        state: state of the run, for the message, or a function that returns it.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        expected = expected() if callable(expected) else expected
        needs = "" if expected is None else f", which takes about {byte_size(expected)}"
        said = "; ".join(filter(None, [remedy, state() if callable(state) else state]))
        explained = kind(f"out of memory while making {what}{needs}{asked_for(error)}; {said}")
        explained.__notes__ = [RAN_OUT]
        raise explained from None


def ran_out(error: BaseException) -> bool:
    """Whether `memory_for` has explained this error."""
    return RAN_OUT in getattr(error, "__notes__", ())
