"""Where in a table's files the encoded images are.

An Arrow file holds the bytes of an image as they are, and so does a Parquet file whose column is not compressed, which
is what `datasets` writes: an image is read by its offset, like one in a tar. A column that is compressed is copied once
into the cache. Parquet decodes whole row groups, of a hundred images or more, so in a random order each epoch would
read the set a hundred times or more.
"""

import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, BinaryIO, Concatenate, ParamSpec, TypeVar

import numpy as np

from ..errors import DataError
from ..files.headers import reason

if TYPE_CHECKING:
    import pyarrow

_BATCH = 64  # rows to decode at once
Given, Result = ParamSpec("Given"), TypeVar("Result")


@dataclass
class Rows:
    """The rows of one file: offset and length of each image, bytes, and the labels.

    `is_copied` says that the offsets are those in the copy.
    """

    at: np.ndarray
    length: np.ndarray
    labels: "pyarrow.ChunkedArray | None"
    is_copied: bool = False


@dataclass
class Chunk:
    """Encoded images of consecutive rows: `data` holds image i at `offsets[i]`, of `length[i]` bytes."""

    data: memoryview
    address: int
    offsets: np.ndarray
    length: np.ndarray
    labels: "pyarrow.Array | None"

    def image(self, row: int) -> memoryview:
        return self.data[self.offsets[row] : self.offsets[row] + self.length[row]]


class NotInPlace(Exception):
    """A file does not hold the bytes of its images as they are."""


class NotCopied(Exception):
    """A copy cannot be written."""


@dataclass
class _Found:
    at: list[np.ndarray] = field(default_factory=list)
    length: list[np.ndarray] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)

    def add(self, at: np.ndarray, chunk: Chunk) -> None:
        self.at.append(at)
        self.length.append(chunk.length)
        self.labels.append(chunk.labels)

    def rows(self, is_copied: bool = False) -> Rows:
        import pyarrow

        labels = None if not self.labels or self.labels[0] is None else pyarrow.chunked_array(self.labels)
        empty = np.zeros(0, np.int64)
        at, length = (np.concatenate([empty, *parts]) for parts in (self.at, self.length))
        return Rows(at, length, labels, is_copied)


def _intact(function: Callable[Concatenate[str, Given], Result]) -> Callable[Concatenate[str, Given], Result]:
    """Turns what pyarrow raises for a damaged file into a DataError."""

    @wraps(function)
    def read(path: str, *args: Given.args, **options: Given.kwargs) -> Result:
        import pyarrow

        try:
            return function(path, *args, **options)
        except (pyarrow.ArrowException, OSError) as error:
            said = reason(error) if isinstance(error, OSError) else str(error)
            raise DataError(f"{path} cannot be read: {said.splitlines()[0]}; copy or save the file again") from error

    return read


@_intact
def schema_of(path: str, is_arrow: bool) -> "pyarrow.Schema":
    """Names and types of the columns. Raises DataError if a file is damaged or of another format."""
    return _arrow(path).schema if is_arrow else _parquet(path).schema_arrow


@_intact
def rows_in_place(path: str, is_arrow: bool, images: str, labels: str | None) -> Rows:
    """Where a file holds its images. Raises NotInPlace if it holds something else."""
    return _arrow_in_place(path, images, labels) if is_arrow else _parquet_in_place(path, images, labels)


@_intact
def copied_rows(path: str, is_arrow: bool, images: str, labels: str | None, copy: BinaryIO) -> Rows:
    """Writes the images of a file behind each other into a copy, and returns where they are in it.

    Raises NotCopied if that cannot be written.
    """
    found = _Found()
    batches = _arrow(path) if is_arrow else _parquet(path).iter_batches(_BATCH, columns=_columns(images, labels))
    for chunk in _chunks(path, batches, images, labels):
        found.add(copy.tell() + np.cumsum(chunk.length) - chunk.length, chunk)
        try:
            copy.writelines(chunk.image(row) for row in range(len(chunk.length)))
        except OSError as error:
            raise NotCopied(reason(error)) from error
    return found.rows(is_copied=True)


def _arrow(path: str) -> "pyarrow.RecordBatchStreamReader":
    import pyarrow

    return pyarrow.ipc.open_stream(_mapped(path))


def _parquet(path: str) -> "pyarrow.parquet.ParquetFile":
    from pyarrow import parquet

    return parquet.ParquetFile(_mapped(path))


def _mapped(path: str) -> "pyarrow.MemoryMappedFile":
    import pyarrow

    return pyarrow.memory_map(os.fsencode(path))  # a str must be UTF-8


def _columns(images: str, labels: str | None) -> list[str]:
    return [images] if labels is None else [images, labels]


def _arrow_in_place(path: str, images: str, labels: str | None) -> Rows:
    import pyarrow

    found = _Found()
    with _mapped(path) as file:
        whole = file.read_buffer()
        file.seek(0)
        for chunk in _chunks(path, pyarrow.ipc.open_stream(file), images, labels):
            start = chunk.address - whole.address
            if chunk.length.any() and not 0 <= start <= whole.size - len(chunk.data):
                raise NotInPlace(path)
            found.add(start + chunk.offsets, chunk)
    return found.rows()


def _parquet_in_place(path: str, images: str, labels: str | None) -> Rows:
    table, found = _parquet(path), _Found()
    groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        for number, group in enumerate(groups):
            column = next(
                column
                for column in map(group.column, range(group.num_columns))
                if column.path_in_schema in (images, f"{images}.bytes")
            )
            if column.compression != "UNCOMPRESSED":
                raise NotInPlace(path)
            first = column.dictionary_page_offset or column.data_page_offset
            start, end = first, first + column.total_compressed_size
            batches = table.iter_batches(_BATCH, row_groups=[number], columns=_columns(images, labels))
            for chunk in _chunks(path, batches, images, labels):
                at = np.zeros(len(chunk.length), np.int64)
                for row in np.flatnonzero(chunk.length).tolist():
                    content = bytes(chunk.image(row))
                    at[row] = whole.find(content, start, end)
                    if at[row] < 0:  # one that came before, in a dictionary
                        at[row] = whole.find(content, first, end)
                    if at[row] < 0:
                        raise NotInPlace(path)
                    start = int(at[row]) + len(content)
                found.add(at, chunk)
    return found.rows()


def _chunks(path: str, batches: Any, images: str, labels: str | None) -> Iterator[Chunk]:
    """The columns of each batch. Raises DataError if a row has a path in place of bytes."""
    rows = 0
    for batch in batches:
        values = batch.column(images)
        if values.type.num_fields:
            fields = dict(zip([each.name for each in values.type], values.flatten(), strict=True))
            values = fields["bytes"]
            if "path" in fields and len(elsewhere := np.flatnonzero(_is_null(values) & ~_is_null(fields["path"]))):
                raise DataError(
                    f"{path}: row {rows + int(elsewhere[0])} holds the path of a file, not its bytes; save the table "
                    "again with them (in `datasets`, save_to_disk does)"
                )
        rows += len(values)
        yield _chunk(values, None if labels is None else batch.column(labels))


def _chunk(values: "pyarrow.Array", labels: "pyarrow.Array | None") -> Chunk:
    import pyarrow

    _, offsets, data = values.buffers()
    kind = np.int64 if pyarrow.types.is_large_binary(values.type) else np.int32
    size = np.dtype(kind).itemsize
    offset = np.zeros(1, np.int64)
    if len(values):
        offset = np.frombuffer(offsets, kind, len(values) + 1, values.offset * size).astype(np.int64)
    length = np.where(_is_null(values), 0, np.diff(offset))
    content, address = (memoryview(b""), 0) if data is None else (memoryview(data), data.address)
    return Chunk(content, address, offset[:-1], length, labels)


def _is_null(values: "pyarrow.Array") -> np.ndarray:
    return values.is_null().to_numpy(zero_copy_only=False)
