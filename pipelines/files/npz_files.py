"""Reads .npz files that may be absent, damaged or something else."""

import lzma
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np

# Errors of numpy and zipfile for an .npz file that is absent, truncated, overwritten or something else.
DAMAGED = (
    *(OSError, EOFError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, SyntaxError),
    *(NotImplementedError, RuntimeError, MemoryError, SystemError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, tokenize.TokenError),
)


def read_arrays(file: Path | IO[bytes]) -> dict[str, np.ndarray]:
    """All arrays of an .npz file. Raises one of `DAMAGED` if it is absent or damaged."""
    with np.load(file) as content:
        return {key: np.asarray(content[key]) for key in content.files}  # numpy returns other members as bytes


def within(positions: np.ndarray, count: int) -> bool:
    """Whether all integers are positions in a sequence of `count` items."""
    return not positions.size or bool(positions.min() >= 0 and positions.max() < count)
