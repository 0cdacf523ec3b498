"""Reads a text file that lists images, a path per line, and their labels."""

import os
import re

from ..errors import DataError
from ..files.headers import ENDINGS, EXTENSIONS, reason

_SHOWN = 40  # characters of a line in a message


def list_text(source: str) -> tuple[list[int], list[bytes], list[bytes]]:
    """Line numbers (from 1), names and texts of the labels of the images in a list.

    Without labels there are no texts.

    Raises:
        DataError: the list cannot be read, names no image, or only some of its lines have labels.
    """
    try:
        with open(source, "rb") as file:
            content = file.read().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise DataError(f"{source} cannot be read: {reason(error)}; check the path and its permissions") from error
    if b"\0" in content:
        raise DataError(f"{source}: not a text file in UTF-8; write the path of an image per line")
    lines = [
        (number, text)
        for number, line in enumerate(content.split(b"\n"), 1)
        if (text := line.strip(b" \r")) and not text.startswith(b"#") and not text.isspace()
    ]
    if not lines:
        raise DataError(f"{source}: lists no image; write the path of an image per line")
    names, texts = _split_lines(source, lines)
    names = [os.path.expanduser(name) if name.startswith(b"~/") else name for name in names]
    return [number for number, _ in lines], names, texts


def not_there(source: str, numbers: list[int], names: list[bytes], missing: list[int]) -> str:
    """The message for a list with missing images, given by their positions."""
    first = missing[0]
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    name = os.fsdecode(names[first])
    is_text = len(name) > _SHOWN and not name.lower().endswith(EXTENSIONS)  # of a file that is no list
    path = f"{name[:_SHOWN]}..." if is_text else os.path.join(os.path.dirname(source), name)
    return (
        f"{source}, line {numbers[first]}: {path} does not exist or is not a file{more}; correct the path, which "
        "is relative to the list's folder, or remove the line; put a TAB before a label"
    )


def _split_lines(source: str, lines: list[tuple[int, bytes]]) -> tuple[list[bytes], list[bytes]]:
    """Names and the texts of their labels (none without labels)."""
    rows = [text.split(b"\t") for _, text in lines]
    if all(len(row) == 1 for row in rows):
        spaced = [re.fullmatch(rb"(.*\S) (\d+)", text) for _, text in lines]
        if all(spaced):
            return [match[1] for match in spaced], [match[2] for match in spaced]
        typical = [bool(match) and match[1].lower().endswith(ENDINGS) for match in spaced]
        if any(typical):
            raise DataError(_mixed(source, lines, typical, "a blank and an integer"))
        return [row[0] for row in rows], []
    for (number, _), row in zip(lines, rows, strict=True):
        if len(row) > 2 or not all(part.strip() for part in row):
            raise DataError(f"{source}, line {number}: unreadable; write PATH, or PATH, one TAB and a label")
    if not all(len(row) == 2 for row in rows):
        raise DataError(_mixed(source, lines, [len(row) == 2 for row in rows], "a TAB and a label"))
    return [row[0].strip() for row in rows], [row[1].strip() for row in rows]


def _mixed(source: str, lines: list[tuple[int, bytes]], labelled: list[bool], form: str) -> str:
    return (
        f"{source}, line {lines[labelled.index(False)][0]}: has no label ({form}), but {sum(labelled)} of {len(lines)} "
        "lines have one; label all lines or none"
    )
