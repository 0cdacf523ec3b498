"""The files of a scan: rows are appended, everything else is replaced as a whole.

    FOLDER/scan.json       which images are scanned; only a scan of the same images continues the rows
    FOLDER/manifest.csv    a row per image, in the manifest's order; COLUMNS
    FOLDER/bad.csv         path and reason of the images that cannot be decoded; written at the end
    FOLDER/duplicates.csv  path of each image with the same bytes as an earlier one, and the path of that one

The final report is made from manifest.csv alone, so an interrupted scan ends like one that was not.
"""

import contextlib
import csv
import errno
import fcntl
import io
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..files.headers import reason
from ..files.whole_files import write_whole
from ..manifest import Manifest

COLUMNS = ("path", "label", "width", "height", "format", "colour", "bytes", "digest", "note")
BAD = "bad: "  # start of the note of an image that cannot be used; then a kind and details in brackets
FILES = ("manifest.csv", "bad.csv", "duplicates.csv")
TEXT = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}  # a file's name need not be UTF-8

_DESCRIPTION = "scan.json"
_VERSION = 1  # raise when rows change: a scan of an older version is not continued


@contextlib.contextmanager
def open_rows(folder: Path) -> Iterator[io.FileIO]:
    """The file of rows, locked for this scan."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = [name for name in FILES if (folder / name).exists() and (folder / name).stat().st_size]
        _before(folder)  # raises if another program wrote it
        if taken and not (folder / _DESCRIPTION).exists():
            raise DataError(f"{folder} holds a {taken[0]} that is not from a scan; give another folder")
        file = open(folder / "manifest.csv", "ab", buffering=0)  # noqa: SIM115  closed below
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        raise DataError(f"{folder} cannot be written: {reason(error)}; give another folder") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{folder}: another scan is writing there; wait for it, or give another folder") from None
        except OSError:  # a file system without locks
            pass
        yield file


def begin(manifest: Manifest, source: str, folder: Path, rows: io.FileIO) -> None:
    """Drops the results of a scan of other files, and records which files are scanned now."""
    now = {"version": _VERSION, "path": source, "fingerprint": manifest.fingerprint, "images": len(manifest)}
    before = _before(folder)
    state = ("version", "fingerprint", "images")
    if before and all(before.get(key) == now[key] for key in state):
        return
    if before and before.get("path") != now["path"]:
        raise DataError(f"{folder} holds the scan of {before.get('path')}; give another folder")
    if before:
        warnings.warn(f"the images have changed since the scan in {folder}, so it starts again", stacklevel=4)
    rows.truncate(0)
    for name in FILES[1:]:
        (folder / name).unlink(missing_ok=True)
    write_whole(folder / _DESCRIPTION, json.dumps(now, indent=2).encode())


def _before(folder: Path) -> dict[str, Any]:
    """The description of an earlier scan; empty if there is none, or a crash left its file empty."""
    try:
        content = (folder / _DESCRIPTION).read_bytes()
    except FileNotFoundError:
        return {}
    with contextlib.suppress(ValueError):
        before = json.loads(content or b"{}")
        if before == {} or (isinstance(before, dict) and {"version", "fingerprint"} <= before.keys()):
            return before
    raise DataError(f"{folder} holds a {_DESCRIPTION} that is not from a scan; give another folder")


def go_on(manifest: Manifest, rows: io.FileIO) -> tuple[int, int]:
    """Truncates the file after the last complete row, in case the scan was killed while writing.

    Returns how many images have a row, and how many of these are bad.
    """
    end = read = done = bad = 0

    def lines() -> Iterator[str]:
        nonlocal read
        with open(rows.name, "rb") as file:
            for line in file:
                read += len(line)
                if not line.endswith(b"\n"):
                    return
                yield line.decode(TEXT["encoding"], TEXT["errors"])

    with contextlib.suppress(csv.Error):
        for number, row in enumerate(csv.reader(lines())):
            name = "path" if not number else name_of(manifest, number - 1) if number <= len(manifest) else None
            if len(row) != len(COLUMNS) or row[0] != name:
                break
            end = read
            done = number
            bad += row[-1].startswith(BAD)
    rows.truncate(end)
    if not end:
        append(rows, as_csv([COLUMNS]))
    return done, bad


def append(rows: io.FileIO, content: bytes) -> None:
    """Writes all bytes, or raises OSError with the name of the file."""
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[rows.write(rest) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, rows.name) from error  # the system's error has no name


def as_csv(rows: Iterable[Iterable[Any]]) -> bytes:
    return "".join(map(_csv_line, rows)).encode(TEXT["encoding"], TEXT["errors"])


def _csv_line(row: Iterable[Any]) -> str:
    text = io.StringIO(newline="")
    # Before Python 3.13 the writer quotes a carriage return only where it ends the lines.
    csv.writer(text, lineterminator="\r\n").writerow(row)
    return text.getvalue().removesuffix("\r\n") + "\n"


def name_of(manifest: Manifest, index: int) -> str:
    """The path of an image relative to the manifest's root."""
    return manifest.path(index).removeprefix(os.path.join(manifest.root, ""))
