"""Files of features: one row for each image with its file, label and feature, written some rows at a time."""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from unigrad_fast.runtime.errors import UserError

# By name, what gives all rows of a column, some at a time, from the first on: file [n], label int64 [n], feature fp32
# [n, D]. All have the same rows in each part.
Columns = Mapping[str, Callable[[], Iterator[np.ndarray]]]
Types = Mapping[str, np.dtype]


def write_npz(path: Path, columns: Columns, types: Types, rows: int) -> None:
    """An archive of the arrays file [n], label [n] and feature [n, D], for `numpy.load`."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, kind in types.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                _write_array(file, kind, rows, columns[name]())


def write_npy(path: Path, columns: Columns, types: Types, rows: int) -> None:
    """A structured array [n] with the fields file, label and feature, which `numpy.load` can also map."""
    kind = np.dtype(list(types.items()))

    def joined() -> Iterator[np.ndarray]:
        for parts in zip(*(columns[name]() for name in types), strict=True):
            array = np.empty(len(parts[0]), kind)
            for name, part in zip(types, parts, strict=True):
                array[name] = part
            yield array

    with open(path, "wb") as file:
        _write_array(file, kind, rows, joined())


def write_parquet(path: Path, columns: Columns, types: Types, rows: int) -> None:
    """A table with the columns file, label and feature, the last a list of fixed size; for pandas, polars, DuckDB."""
    import pyarrow
    from pyarrow import parquet

    (width,) = types["feature"].shape
    kinds = {"file": pyarrow.string(), "label": pyarrow.int64(), "feature": pyarrow.list_(pyarrow.float32(), width)}
    schema = pyarrow.schema(list(kinds.items()))
    with parquet.ParquetWriter(path, schema) as writer:
        for file, label, feature in zip(*(columns[name]() for name in kinds), strict=True):
            lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(feature.reshape(-1)), width)
            writer.write_table(pyarrow.table([pyarrow.array(file.tolist()), label, lists], schema=schema))


WRITERS: dict[str, Callable[[Path, Columns, Types, int], None]] = {
    ".npz": write_npz,
    ".npy": write_npy,
    ".parquet": write_parquet,
}


def require_writer(path: Path) -> None:
    """Raises UserError if no writer has the ending of a path, or its library is not installed."""
    if path.suffix.lower() not in WRITERS:
        raise UserError(f"output = {path}: give a name that ends in one of {', '.join(WRITERS)}")
    if path.suffix.lower() == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UserError(
            f"output = {path}: needs pyarrow, which is not installed; type `pip install 'unigrad-fast[parquet]'`, or "
            "give a name that ends in .npz"
        )


def _write_array(file: IO[bytes], kind: np.dtype, rows: int, parts: Iterator[Any]) -> None:
    """An array in NumPy's format, whose last dimensions are those of the type."""
    base, shape = kind.subdtype or (kind, ())
    header = {"descr": np.lib.format.dtype_to_descr(base), "fortran_order": False, "shape": (rows, *shape)}
    np.lib.format.write_array_header_2_0(file, header)
    for part in parts:
        file.write(np.ascontiguousarray(part, base).tobytes())
