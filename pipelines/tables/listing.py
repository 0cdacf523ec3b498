"""Lists the images of a table: from the cache, or by reading its files once."""

import fcntl
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..errors import DataError
from ..files.headers import reason
from ..files.tar_format import text_of
from ..files.whole_files import whole
from ..listing.shards import index_in
from ..shards.archives import Shards, digests_of_ends
from ..shards.index import Index
from ..storage import joined
from .columns import choose_columns, labels_of
from .finding import Tables
from .rows import NotCopied, NotInPlace, Rows, copied_rows, rows_in_place, schema_of

COPY_ENDS = "copy_ends"  # cached digest of the ends of the copy; empty if there is none


def list_tables(
    tables: Tables, own: Shards, content: dict[str, np.ndarray], store: Path | None
) -> tuple[Index, Shards, dict[str, np.ndarray], bool]:
    """The index of the images, the files that it points into, further arrays for the cache, and whether all was cached.

    Args:
        tables: the files and columns.
        own: the files as shards.
        content: cached arrays of these files.
        store: the cache file of this source, beside which compressed images are copied; None if there is none.

    Raises:
        DataError: pyarrow is not installed, a file is damaged, a column is missing or labels are wrong; or compressed
            images cannot be copied.
    """
    copy = None if store is None else store.with_suffix(".images")
    ends = content.get(COPY_ENDS)
    if ends is not None and ends.dtype == np.uint8:
        shards = own
        if len(ends) and copy is not None and copy.exists():
            shards = _with_copy(own, copy)
        index = index_in(content, shards)
        if index is not None and np.array_equal(shards.ends[len(own.files) :], ends.reshape(-1, 16)):
            return index, shards, {COPY_ENDS: ends}, True
    require_pyarrow(tables.source)
    images, labels, names = _columns(tables)
    found = _read(tables, images, labels, copy)
    is_copied = any(rows.is_copied for rows in found)
    shards = _with_copy(own, copy) if is_copied and copy is not None else own
    index = _index(tables, found, names)
    ends = shards.ends[len(own.files) :]
    return index, shards, {COPY_ENDS: ends}, False


def _columns(tables: Tables) -> tuple[str, str | None, list[str] | None]:
    """As `choose_columns`, of all files."""
    first, *others = tables.paths()
    schema = schema_of(first, tables.is_arrow)
    images, labels, names = choose_columns(tables, schema)
    for path in others:
        other = schema_of(path, tables.is_arrow)
        for column in filter(None, (images, labels)):
            if column not in other.names or other.field(column).type != schema.field(column).type:
                raise DataError(f"{path}: its column {column} is missing or of another type than in {first}")
    return images, labels, names


def require_pyarrow(source: str) -> None:
    """Raises DataError if pyarrow, an extra, is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"{source}: needs pyarrow, which is not installed; type `pip install 'unigrad-fast[parquet]'`"
        ) from error


def _with_copy(own: Shards, copy: Path) -> Shards:
    return own.followed_by(Shards.of(own.root, [os.fspath(copy)]))


def _read(tables: Tables, images: str, labels: str | None, copy: Path | None) -> list[Rows]:
    """The rows of every file; the files whose images are compressed share one copy."""
    found: list[Rows] = []
    columns = (tables.is_arrow, images, labels)
    try:
        with ExitStack() as stack:
            file: BinaryIO | None = None
            for path in tables.paths():
                try:
                    found.append(rows_in_place(path, *columns))
                except NotInPlace:
                    if file is None:
                        file = stack.enter_context(_copying(_announced(tables, copy)))
                    found.append(copied_rows(path, *columns, file))
    except (OSError, NotCopied) as error:
        why = reason(error) if isinstance(error, OSError) else error
        raise DataError(f"{copy} cannot be written: {why}; {_REMEDY}") from error
    return found


@contextmanager
def _copying(copy: Path) -> Iterator[BinaryIO]:
    """The file of a copy, which takes the place of another one unless that is equal: a run may be reading it."""
    with open(f"{copy}.lock", "ab") as lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making the same copy
        new = copy.with_name(f"{copy.name}.new")
        with whole(new) as file:
            yield file
        if copy.exists() and len({(each.stat().st_size, _ends(each)) for each in (copy, new)}) == 1:
            new.unlink()
        else:
            os.replace(new, copy)


def _ends(file: Path) -> bytes:
    return digests_of_ends(os.fspath(file.parent), [file.name]).tobytes()


_REMEDY = "name a folder with more room in UNIGRAD_CACHE, or save the table without compression"


def _announced(tables: Tables, copy: Path | None) -> Path:
    """The path of the copy, which the user is told of. Raises DataError if there is none, or too little room."""
    size = sum(os.path.getsize(path) for path in tables.paths())
    if copy is None:
        raise DataError(f"{tables.source}: is compressed, and there is no folder to copy its images to; {_REMEDY}")
    copy.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(copy.parent).free
    if size > free:
        raise DataError(
            f"{tables.source}: is compressed, and {copy.parent} has {free / 1e9:.1f} GB for a copy of its images, "
            f"which take at least {size / 1e9:.1f} GB; {_REMEDY}"
        )
    warnings.warn(
        f"{tables.source} is compressed, so its images are copied once, to {copy} ({size / 1e9:.1f} GB or more)",
        stacklevel=4,
    )
    return copy


def _index(tables: Tables, found: list[Rows], names: list[str] | None) -> Index:
    counts = [len(rows.at) for rows in found]
    if not sum(counts):
        raise DataError(f"{tables.source}: holds no images; its tables have no rows")
    members = [
        f"{name}/{row:07}".encode("utf-8", "surrogateescape")
        for name, count in zip(tables.files, counts, strict=True)
        for row in range(count)
    ]

    def place(image: int) -> str:
        return os.path.join(tables.root, text_of(members[image]))

    labels, classes = None, []
    if chunks := [chunk for rows in found if rows.labels is not None for chunk in rows.labels.chunks]:
        import pyarrow

        labels, classes = labels_of(pyarrow.chunked_array(chunks), names, place)
    copy = len(tables.files)
    shard = [copy if rows.is_copied else number for number, rows in enumerate(found)]
    joined_names, offsets = joined(members)
    return Index(
        names=joined_names,
        offsets=offsets,
        shard=np.repeat(np.array(shard, np.int32), counts),
        at=np.concatenate([rows.at for rows in found]),
        length=np.concatenate([rows.length for rows in found]),
        labels=np.zeros(0, np.int64) if labels is None else labels,
        classes=np.array(classes, np.str_),
    )
