"""Which columns of a table hold the images and their labels."""

import json
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataError
from ..listing.labels import number_labels
from .finding import Tables

if TYPE_CHECKING:
    import pyarrow

USUAL_IMAGES, USUAL_LABELS = "image", "label"  # names that decide between several columns


def choose_columns(tables: Tables, schema: "pyarrow.Schema") -> tuple[str, str | None, list[str] | None]:
    """Names of the column of images and of that of labels (None without labels), and class names if the table has them.

    Hugging Face's features decide, where the table has them: Image and ClassLabel. Otherwise bytes, or a struct with
    `bytes`, are images, and `label` is the label.

    Raises:
        DataError: a column that is given is not there or of another kind, or several could hold the images.
    """
    features = _features(schema)
    encoded = [field.name for field in schema if is_encoded(field.type)]
    marked = [name for name in encoded if features.get(name, {}).get("_type") == "Image"]
    images = _one(tables, tables.images, encoded, marked or encoded)
    classes = [name for name, feature in features.items() if feature.get("_type") == "ClassLabel"]
    texts = [field.name for field in schema if _is_label(field.type)]
    labels = tables.labels
    if labels and labels not in texts:
        raise DataError(f"{tables.source}: no column {labels} of labels; {_there(texts)}")
    if not labels:
        usual = [name for name in classes or texts if name == USUAL_LABELS]
        labels = classes[0] if len(classes) == 1 else usual[0] if usual else ""
        if len(classes) > 1 and not labels:
            warnings.warn(
                f"{tables.source}: several columns of classes, so no labels are read; give one of {', '.join(classes)} "
                f"behind the column of images: {images}:{classes[0]}",
                stacklevel=4,
            )
        elif not labels and USUAL_LABELS in schema.names:
            kind = schema.field(USUAL_LABELS).type
            warnings.warn(
                f"{tables.source}: its column {USUAL_LABELS} is of type {kind}, so no labels are read; save it as "
                "integers or texts",
                stacklevel=4,
            )
    names = features.get(labels, {}).get("names") if labels in classes else None
    return images, labels or None, names


def is_encoded(kind: "pyarrow.DataType") -> bool:
    """Whether a type may hold encoded images: bytes, or a struct with bytes."""
    from pyarrow import types

    if types.is_struct(kind):
        kind = next((field.type for field in kind if field.name == "bytes"), kind)
    return types.is_binary(kind) or types.is_large_binary(kind)


def labels_of(
    values: "pyarrow.ChunkedArray", names: list[str] | None, place: Callable[[int], str]
) -> tuple[np.ndarray | None, list[str]]:
    """Labels (int64 [n]; None without labels) and class names, from a column of them.

    Args:
        values: integers or texts; nothing, and -1 under class names, is no label.
        names: class names in the order of the integers; None if the labels name the classes.
        place: describes the position of a label, for messages.

    Raises:
        DataError: only some images have labels, or an integer is out of range.
    """
    texts: list[Any] = values.to_pylist()
    without = [number for number, text in enumerate(texts) if text is None or (names is not None and text == -1)]
    if len(without) == len(texts):
        return None, []
    if without:
        count = len(texts) - len(without)
        raise DataError(f"{place(without[0])}: has no label, but {count} of {len(texts)} have one; label all or none")
    if names is None:
        return number_labels([str(text).encode("utf-8", "surrogateescape") for text in texts], place)
    labels = np.array(texts, np.int64)
    if len(wrong := np.flatnonzero((labels < 0) | (labels >= len(names)))):
        raise DataError(f"{place(int(wrong[0]))}: label {labels[wrong[0]]}, but there are {len(names)} class names")
    return labels, list(names)


def _features(schema: "pyarrow.Schema") -> dict[str, Any]:
    """Hugging Face's features by column; empty without them."""
    try:
        return json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}


def _is_label(kind: "pyarrow.DataType") -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):  # categories in pandas
        kind = kind.value_type
    return types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind)


def _one(tables: Tables, given: str, possible: list[str], likely: list[str]) -> str:
    if given:
        if given in possible:
            return given
        raise DataError(f"{tables.source}: no column {given} of encoded images; {_there(possible)}")
    if not possible:
        raise DataError(
            f"{tables.source}: no column of encoded images (bytes, or a struct with bytes); in `datasets`, "
            "cast_column(NAME, Image()) makes one"
        )
    if len(likely) == 1 or USUAL_IMAGES in likely:
        return likely[0] if len(likely) == 1 else USUAL_IMAGES
    raise DataError(f"{tables.source}: several columns may hold the images; give one of {', '.join(likely)}")


def _there(names: list[str]) -> str:
    return f"there is {', '.join(names)}" if names else "there is none"
