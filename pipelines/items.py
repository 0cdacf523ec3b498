"""Images that come from a Dataset in this process: anything with a length and `dataset[i]`, as torch's map-style ones.

An item is a picture, a tuple that begins with one and may go on with its label, or a dict with `image` and `label`. A
picture is one of these:

    a Pillow image         mode 1, L, LA, P, PA, RGB or RGBA; alpha is dropped, as it is of files
    a uint8 tensor         [C, H, W] or [H, W], as torchvision gives it; C is 1, 3 or 4 (alpha is dropped)
    a uint8 array          [H, W, C] or [H, W], as NumPy and OpenCV have it
    encoded bytes          the content of an image file, also as a uint8 tensor or array of one dimension

Pixels travel as PNM, a header and the bytes as they are: the decoder copies them, and what follows is that of files.

The process remembers each Dataset under a name made of its class, its length and a digest of `SAMPLED` evenly spaced
items. A configuration holds that name in place of a path.
"""

import hashlib
import io
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from .errors import DataError
from .files.headers import size_in
from .files.slow_storage import THREADS
from .spelling import DATASET
from .storage import Storage

SAMPLED = 16  # items of the digest
_ALPHA_OR_PALETTE = ("1", "LA", "P", "PA", "RGBA")
_given: dict[str, tuple[Any, int]] = {}  # by name: the Dataset, and the mean size of its sampled items, encoded


def give(dataset: Any) -> str:
    """Remembers a Dataset, and returns its name: `dataset:CLASS:LENGTH:DIGEST`.

    Raises:
        DataError: it has no length, no items or no random access, or an item is no picture or differs each time.
    """
    source, mean = _described(dataset)
    _given[source] = dataset, mean
    return source


def given(source: str) -> Any:
    """The Dataset of a name. Raises DataError if this process was not given it, or it has changed since."""
    if source not in _given:
        raise DataError(
            f"{source}: a Dataset that was given from Python, and this process has none like it; give it again: "
            'pretrain, Run.resume and evaluate.knn take data={"train": DATASET, "val": DATASET}'
        )
    dataset, _ = _given[source]
    now, _ = _described(dataset)
    if now != source:
        raise DataError(f"{source}: has changed since it was given, and is {now} now; give it again")
    return dataset


@dataclass(frozen=True, eq=False)
class Items(Storage):
    """Items of a Dataset of this process, at some positions (int64 [n])."""

    source: str
    positions: np.ndarray = field(repr=False)

    on_disk = False

    @property
    def contents(self) -> str:
        return self.source

    def read(self, image: int) -> bytes | memoryview:
        dataset, _ = _given[self.source]
        return _read(dataset, int(self.source.split(":")[2]), int(self.positions[image]))

    def size(self, image: int) -> tuple[int, int]:
        return size_of(self.read(image))

    def state(self, image: int) -> tuple[int, int]:
        return 0, 0

    def files(self, images: Any) -> list[str]:
        return []

    def part(self, positions: np.ndarray, names: np.ndarray, offsets: np.ndarray) -> "Items":
        return Items(self.source, self.positions[positions])


def size_of(data: bytes | memoryview) -> tuple[int, int]:
    """Width and height from the header of encoded bytes. Raises OSError if they have none."""
    with suppress(ValueError):
        kind, size, most, _ = bytes(data[:32]).split(b"\n", 3)
        if kind in (b"P5", b"P6") and most == b"255":  # as `encoded` writes it
            width, height = map(int, size.split())
            return width, height
    return size_in(io.BytesIO(data))


def mean_bytes(source: str) -> int:
    """Mean size of the sampled items of a Dataset that was given, encoded."""
    return _given[source][1]


def labels_of(dataset: Any) -> tuple[np.ndarray | None, list[str]]:
    """Labels (int64 [n]; None without labels) and class names of a Dataset.

    The labels are its `targets` or `labels`, as in torchvision's, or its column `label`, as in Hugging Face's; of a
    Subset, those of its Dataset. Otherwise they are in the items, all of which are read once. Names are its `classes`.
    """
    found = _attribute(dataset)
    if found is None:
        found = [_label_at(dataset, place) for place in _places(len(dataset))]
        if any(label is None for label in found):
            return None, []
        if all(isinstance(label, int) for label in found):
            warnings.warn(
                f"{_name(dataset)} has no `targets` with a label per item, so all {len(dataset):,} items are read for "
                "theirs; give it that attribute, or leave the labels out of its items",
                stacklevel=3,
            )
            with ThreadPoolExecutor(THREADS) as pool:
                found = list(pool.map(lambda place: _label_at(dataset, place), range(len(dataset))))
    with suppress(ValueError, TypeError):  # they are of no one form
        found = np.asarray(found)
    values = found if isinstance(found, np.ndarray) else np.empty(0)
    if values.dtype.kind not in "iu" or values.shape != (len(dataset),) or values.min() < 0:
        warnings.warn(
            f"{_name(dataset)}: its labels are not one integer from 0 per item, so they are not used",
            stacklevel=3,
        )
        return None, []
    names, numbers = [str(name) for name in _classes(dataset)], [str(i) for i in range(values.max() + 1)]
    if 0 < len(names) < len(numbers):
        warnings.warn(
            f"{_name(dataset)}: its `classes` name {len(names)} of {len(numbers)} classes, so their numbers are used",
            stacklevel=3,
        )
    return values.astype(np.int64), names if len(names) >= len(numbers) else numbers


def encoded(picture: Any) -> bytes | memoryview:
    """A picture as the content of an image file: encoded bytes as they are, pixels as PNM.

    Raises:
        DataError: it is of none of the kinds above.
    """
    if isinstance(picture, (bytes, bytearray, memoryview)):
        return bytes(picture)
    if isinstance(picture, Image.Image):
        if picture.mode not in ("L", "RGB", *_ALPHA_OR_PALETTE):
            raise DataError(f'a Pillow image of mode {picture.mode}; return image.convert("RGB")')
        return _pnm(np.asarray(picture.convert("RGB") if picture.mode in _ALPHA_OR_PALETTE else picture))
    torch, layout = sys.modules.get("torch"), "[H, W, C]"
    if torch is not None and isinstance(picture, torch.Tensor):
        picture, layout = picture.numpy(force=True), "[C, H, W]"
    elif not isinstance(picture, np.ndarray):
        raise DataError(f"a {type(picture).__name__}; return a Pillow image, a uint8 tensor or array, or encoded bytes")
    if picture.dtype != np.uint8:
        raise DataError(f"pixels of type {picture.dtype}; return uint8, from 0 to 255, without ToTensor and Normalize")
    if picture.ndim == 1:
        return picture.tobytes()
    pixels = picture.transpose(1, 2, 0) if picture.ndim == 3 and layout == "[C, H, W]" else picture
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    if pixels.ndim not in (2, 3) or channels not in (1, 3, 4) or not pixels.size:
        raise DataError(f"pixels of shape {list(picture.shape)}; return {layout} with 1, 3 or 4 channels")
    return _pnm(pixels[..., 0] if pixels.ndim == 3 and channels == 1 else pixels[..., :3] if channels == 4 else pixels)


def _pnm(pixels: np.ndarray) -> memoryview:
    """Pixels uint8 [H, W] or [H, W, 3] behind a header."""
    height, width = pixels.shape[:2]
    header = b"P%d\n%d %d\n255\n" % (5 if pixels.ndim == 2 else 6, width, height)
    content = np.empty(len(header) + pixels.size, np.uint8)
    content[: len(header)] = np.frombuffer(header, np.uint8)
    content[len(header) :].reshape(pixels.shape)[...] = pixels
    return memoryview(content)


def _read(dataset: Any, length: int, place: int) -> bytes | memoryview:
    """An encoded item. Raises OSError if its picture is bad, DataError for anything else."""
    with _told(dataset, place):
        if len(dataset) != length:
            raise DataError(f"there were {length:,} items, and {len(dataset):,} now; their number must not change")
        item = dataset[place]
        if isinstance(item, Mapping) and "image" not in item:
            raise DataError(f"a dict with {', '.join(map(str, item))}; name the picture `image` and its label `label`")
        return encoded(item["image"] if isinstance(item, Mapping) else item[0] if _is_row(item) else item)


@contextmanager
def _told(dataset: Any, place: int) -> Iterator[None]:
    """Turns what a Dataset raises into OSError for a bad picture, and a DataError with the item for anything else."""
    try:
        yield
    except OSError:
        raise
    except (SyntaxError, Image.DecompressionBombError) as error:  # Pillow's
        raise UnidentifiedImageError(str(error)) from error
    except DataError as error:
        raise DataError(f"{_name(dataset)}, item {place}: {error}") from error
    except Exception as error:
        *_, where = traceback.extract_tb(error.__traceback__)
        raise DataError(
            f"{_name(dataset)}, item {place}: {type(error).__name__}: {error} ({where.filename}, line {where.lineno}); "
            "repair the Dataset; one that cannot read a picture raises OSError, and the picture is replaced"
        ) from error


def _described(dataset: Any) -> tuple[str, int]:
    """The name, with class, length and digest, and the mean size of the sampled items, encoded."""
    torch = sys.modules.get("torch")
    is_stream = torch is not None and isinstance(dataset, torch.utils.data.IterableDataset)
    if is_stream or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"a {_name(dataset)} has no length or no random access, which order and resuming need; save its pictures "
            "as files, as Parquet or with `datasets`, and pack them with `unigrad-fast data shard SOURCE FOLDER`"
        )
    length = len(dataset)
    if not length:
        raise DataError(f"{_name(dataset)} has no items; give a Dataset with images")
    found, sizes = hashlib.blake2b(digest_size=8), []
    for place in _places(length):
        content = _sampled(dataset, place)
        if content != _sampled(dataset, place):
            raise DataError(
                f"{_name(dataset)}, item {place}: differs when it is read again; remove its random transforms, for "
                "data.preset augments"
            )
        found.update(b"%d:" % len(content))
        found.update(content)
        sizes.append(len(content))
    return f"{DATASET}:{_name(dataset)}:{length}:{found.hexdigest()}", int(np.mean(sizes))


def _sampled(dataset: Any, place: int) -> bytes | memoryview:
    """An encoded item; nothing if its picture is bad."""
    with suppress(OSError):
        return _read(dataset, len(dataset), place)
    return b""


def _places(length: int) -> list[int]:
    return np.unique(np.linspace(0, length - 1, SAMPLED).astype(int)).tolist()


def _name(dataset: Any) -> str:
    return type(dataset).__name__


def _is_row(item: Any) -> bool:
    return isinstance(item, (tuple, list)) and bool(item)


def _attribute(dataset: Any) -> Any:
    """The labels that a Dataset has as an attribute, itself or around a Subset; None if it has none."""
    for name in ("targets", "labels", "_labels"):
        with suppress(TypeError):
            if len(values := getattr(dataset, name, ())) == len(dataset):
                return values
    if "label" in getattr(dataset, "column_names", ()):  # Hugging Face's
        return list(dataset["label"])
    if hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        inner = _attribute(dataset.dataset)
        return None if inner is None else np.asarray(inner)[np.asarray(dataset.indices)]
    return None


def _classes(dataset: Any) -> Iterator[Any]:
    found = getattr(dataset, "classes", None)
    if found is None and hasattr(dataset, "dataset"):
        return _classes(dataset.dataset)
    if found is None and "label" in getattr(dataset, "column_names", ()):
        found = getattr(dataset.features["label"], "names", None)
    return iter(found or ())


def _label(item: Any) -> Any:
    """The label in an item; None if it has none."""
    value = item.get("label") if isinstance(item, Mapping) else item[1] if _is_row(item) and len(item) > 1 else None
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def _label_at(dataset: Any, place: int) -> Any:
    """The label of an item; None if it has none; 0 if its picture is bad, as no batch has it."""
    try:
        with _told(dataset, place):
            return _label(dataset[place])
    except OSError:
        return 0
