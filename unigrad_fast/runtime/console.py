"""Standard output and standard error, whatever they are: without some characters, very narrow, closed, or gone.

Where nobody reads them any more (`| head`, a terminal that was closed), what is written to them is dropped: a command
does its work as it would have, and ends with the status that it would have had.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

from rich.console import Console

from unigrad_fast.runtime import fallback

# The reader of a pipe, the other end of a connection, the terminal is gone.
GONE = (errno.EPIPE, errno.ECONNRESET, errno.EIO, errno.ENXIO, errno.EBADF)
SIZES = {"COLUMNS": (40, 1000), "LINES": (10, 1000)}  # between them tables and help can be read


class Outlet(io.RawIOBase):
    """A file descriptor that takes everything. What could not be written is dropped, with all that follows.

    Attributes:
        failure: why, unless it is that nobody reads it.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.number

    def isatty(self) -> bool:
        return os.isatty(self.number)

    def write(self, content) -> int:
        while True:
            try:
                return os.write(self.number, content)
            except BlockingIOError:  # another process that writes there wanted it so
                select.select([], [self.number], [])
            except OSError as error:
                if error.errno not in GONE:
                    self.failure = error
                _take_null(self.number)  # what libraries write there themselves goes the same way
                return len(content)


def take_over() -> None:
    """Makes the process's standard streams such that printing never fails; to be called before anything is opened."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the first file that is opened would take its place
            _take_null(number)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None or (stream is getattr(sys, f"__{name}__") and not isinstance(_raw(stream), Outlet)):
            setattr(sys, name, _opened(stream, number))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=fallback.NAME)
    _keep_size(os.environ)


def end() -> str | None:
    """Hands over what was printed; why not all of standard output could be written, None where nobody reads it."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    raw = _raw(sys.stdout)
    return raw.failure.strerror if isinstance(raw, Outlet) and raw.failure else None


class _Console(Console):
    def print(self, *objects: Any, **settings: Any) -> None:
        super().print(*(fallback.harmless(each) if isinstance(each, str) else each for each in objects), **settings)


def new_console(**settings: Any) -> Console:
    """A console that shows text as it is, for the name of a folder may look like markup, or steer a terminal."""
    return _Console(**{"markup": False, "highlight": False, **settings})


def fitted(text: str) -> str:
    """Text for a table: twins of what standard output cannot show have other widths."""
    return fallback.fitted(text, getattr(sys.stdout, "encoding", None))


def _opened(stream: TextIO | None, number: int) -> TextIO:
    """A stream like the given one, which is left open, for others may hold it."""
    if stream is None:
        return io.TextIOWrapper(io.BufferedWriter(Outlet(number)), encoding="utf-8", errors=fallback.NAME)
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(Outlet(number)),
        encoding=stream.encoding,
        errors=fallback.NAME,
        line_buffering=stream.line_buffering or number == 2,
        write_through=stream.write_through,
    )


def _raw(stream: TextIO) -> object:
    return getattr(getattr(stream, "buffer", None), "raw", None)


def _take_null(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
    os.set_inheritable(number, True)


def _keep_size(environ: MutableMapping[str, str]) -> None:
    """Sizes that make no sense are not believed: in a column or two, laying out text does not end."""
    for name, (least, most) in SIZES.items():
        text = environ.get(name, "")
        if not (len(text) < 5 and text.isascii() and text.isdecimal() and least <= int(text) <= most):
            environ.pop(name, None)
    for number in range(3):
        try:
            size = os.get_terminal_size(number)
        except OSError:
            continue
        for (name, (least, _)), found in zip(SIZES.items(), size, strict=True):
            if 0 < found < least:
                environ.setdefault(name, str(least))
