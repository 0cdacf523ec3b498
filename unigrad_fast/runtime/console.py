"""Makes standard output and error usable whatever they are: a limited encoding, very narrow, closed, or disconnected.

If nobody reads them any more (`| head`, a closed terminal), output is dropped: a command does the same work and exits
with the same status as otherwise.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console

from unigrad_fast.runtime import fallback

if TYPE_CHECKING:
    from rich.table import Table

# The reader of a pipe, the other end of a connection or the terminal is gone.
GONE = (errno.EPIPE, errno.ECONNRESET, errno.EIO, errno.ENXIO, errno.EBADF)
SIZES = {"COLUMNS": (40, 1000), "LINES": (10, 1000)}  # limits between which tables and help are readable


class Outlet(io.RawIOBase):
    """A file descriptor to which writing never fails. After an error all further output is dropped.

    Attributes:
        failure: the error, unless the reader is gone.
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
            except BlockingIOError:  # another process made the descriptor non-blocking
                select.select([], [self.number], [])
            except OSError as error:
                if error.errno not in GONE:
                    self.failure = error
                _take_null(self.number)  # so that direct writes of libraries are dropped too
                return len(content)


def take_over() -> None:
    """Replaces the process's standard streams so that printing never fails; call before any file is opened."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed; the next file to be opened would get its number
            _take_null(number)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None or (stream is getattr(sys, f"__{name}__") and not isinstance(_raw(stream), Outlet)):
            setattr(sys, name, _opened(stream, number))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=fallback.NAME)
    _keep_size()


def end() -> str | None:
    """Flushes the streams; returns why standard output is incomplete, or None (also if nobody reads it)."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    raw = _raw(sys.stdout)
    return raw.failure.strerror if isinstance(raw, Outlet) and raw.failure else None


class _Console(Console):
    def print(self, *objects: Any, **settings: Any) -> None:
        super().print(*(fallback.harmless(each) if isinstance(each, str) else each for each in objects), **settings)


def new_console(**settings: Any) -> Console:
    """A console that prints text literally, because a folder's name may look like markup or contain control codes.

    In a notebook it prints plain text, so that the output of a cell is one piece.
    """
    # A notebook says that its output is a terminal, but shows no bar that moves.
    place = {"force_jupyter": False, "force_terminal": False} if in_notebook() else {}
    return _Console(**{"markup": False, "highlight": False, **place, **settings})


def in_notebook() -> bool:
    """Whether this process computes the cells of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


def table_of_figures(*headers: str, **style: object) -> Table:
    """A table whose first column names what was measured and whose other columns are right-aligned figures."""
    from rich.table import Table

    table = Table(*headers, **style)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def fitted(text: str) -> str:
    """Text for a table, with stand-ins for characters that standard output lacks, since these differ in width."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        return text.encode(encoding, fallback.NAME).decode(encoding)
    except LookupError:
        return text


def _opened(stream: TextIO | None, number: int) -> TextIO:
    """A stream like the given one, which stays open because other code may hold it."""
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


def _keep_size() -> None:
    """Corrects absurd terminal sizes: with only one or two columns, laying out text does not terminate."""
    for name, (least, most) in SIZES.items():
        text = os.environ.get(name, "")
        if not (len(text) < 5 and text.isascii() and text.isdecimal() and least <= int(text) <= most):
            os.environ.pop(name, None)
    for number in range(3):
        try:
            size = os.get_terminal_size(number)
        except OSError:
            continue
        for (name, (least, _)), found in zip(SIZES.items(), size, strict=True):
            if 0 < found < least:
                os.environ.setdefault(name, str(least))
