"""The tar format: reads which files an archive holds and where they start; makes headers and padding."""

import os
import tarfile
from collections.abc import Iterator

from ..errors import DataError
from .headers import reason
from .open_files import File, read_at

BLOCK = 512
_FILES, _LINKS = b"\x0007", b"12"  # types of tar members
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
_PIECE = 1 << 20  # bytes to read at once between archives


def members(path: str) -> Iterator[tuple]:
    """Yields, for every file in a tar: its name, start, length, whether it is a link, and a function that reads it.

    Archives that were joined with `cat` are read one after the other; anything else behind an end mark is ignored.
    """
    try:
        file = File(path)
        total = os.fstat(file.number).st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}; check its permissions") from error
    position, long_name, long_length = 0, None, None
    ended = False  # whether an end mark precedes this position
    while True:
        try:
            header = os.pread(file.number, 2 * BLOCK, position)  # including the label that may follow
            if len(header) >= BLOCK and not any(header[:BLOCK]):  # the end mark
                position, long_name, long_length, ended = _behind_zeros(file, position), None, None, True
                header = os.pread(file.number, 2 * BLOCK, position)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {reason(error)}") from error
        header, behind = header[:BLOCK], header[BLOCK:]
        if position == 0 and header.startswith(_COMPRESSED):
            raise DataError(f"{path}: compressed, but images are read by offset; unpack it (gunzip, unxz, unzstd)")
        if len(header) < BLOCK:
            if ended:
                return
            raise DataError(f"{path}: cut off after {total} bytes; copy or pack it again")
        try:
            intact = sum(header) - sum(header[148:156]) + 8 * 32 == int(header[148:156].strip(b" \0"), 8)
            length = _number(header[124:136])
        except ValueError:
            intact = False
        if ended and not intact:
            return
        if not intact:
            what = f"its header at byte {position} is damaged" if position else "not a tar file"
            raise DataError(f"{path}: {what}; copy or pack it again")
        ended = False
        kind, at = header[156:157], position + BLOCK
        if kind not in b"xgLK" and long_length is not None:
            length = long_length
        stored = 0 if kind in _LINKS else length
        position = at + -(-stored // BLOCK) * BLOCK
        if at + stored > total:
            raise DataError(f"{path}: cut off after {total} bytes; copy or pack it again")

        def content(at: int = at, length: int = stored, behind: bytes = behind) -> bytes:
            return behind[:length] if length <= len(behind) else read_at(file, at, length)

        if kind == b"L":
            long_name = content().rstrip(b"\0")
        elif kind == b"x":
            try:
                records = _pax(content())
                long_length = _decimal(records[b"size"]) if b"size" in records else None
            except ValueError as error:
                what = f"{member(path, _short_name(header))}: its extended header at byte {at} is damaged"
                raise DataError(f"{what}; copy or pack the shard again") from error
            long_name = records.get(b"path", long_name)
            if any(key.startswith(b"GNU.sparse") for key in records):
                raise DataError(f"{path}: stored sparsely at byte {at}; pack it without `--sparse`")
        elif kind not in b"gK":
            name = long_name if long_name is not None else _short_name(header)
            if kind == b"S":
                raise DataError(f"{member(path, name)}: stored sparsely; pack it without `--sparse`")
            long_name = long_length = None
            if kind in _FILES + _LINKS and not name.endswith(b"/"):  # old tars write folders so
                yield name.removeprefix(b"./").lstrip(b"/"), at, stored, kind in _LINKS, content


def _number(text: bytes) -> int:
    """A number of a tar header: octal digits, or GNU's binary form for sizes from 8 GiB."""
    if text[0] == 0x80:
        return int.from_bytes(text[1:], "big")
    number = int(text.strip(b" \0") or b"0", 8)
    if number < 0:
        raise ValueError
    return number


def _decimal(text: bytes) -> int:
    if not text.isdigit():
        raise ValueError
    return int(text)


def _behind_zeros(file: File, position: int) -> int:
    """Start of the first block that is not all zeros, or the end of the file."""
    while piece := os.pread(file.number, _PIECE, position):
        if rest := piece.lstrip(b"\0"):
            return (position + len(piece) - len(rest)) // BLOCK * BLOCK
        position += len(piece)
    return position


def _short_name(header: bytes) -> bytes:
    name, prefix = header[:100].partition(b"\0")[0], header[345:500].partition(b"\0")[0]
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _pax(content: bytes) -> dict[bytes, bytes]:
    """Records `LENGTH KEY=VALUE\\n` of an extended header. Raises ValueError if it is damaged."""
    records, start = {}, 0
    while start < len(content):
        space = content.index(b" ", start)
        end = start + _decimal(content[start:space])
        key, equals, value = content[space + 1 : end - 1].partition(b"=")
        if not equals or content[end - 1 : end] != b"\n" or (key == b"path" and b"\0" in value):
            raise ValueError
        records[key] = value
        start = end
    return records


def member(path: str, name: bytes) -> str:
    return os.path.join(path, text_of(name))


def text_of(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def header_of(name: bytes, size: int) -> bytes:
    info = tarfile.TarInfo(text_of(name))
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % BLOCK)
