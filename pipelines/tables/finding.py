"""Finds the files of a table: what Hugging Face's `datasets` saves, a folder as on its hub, or plain Parquet files."""

import json
import os
import re
from collections import defaultdict
from dataclasses import dataclass

from ..errors import DataError
from ..files.headers import reason
from ..spelling import HUGGING_FACE, PARQUET, PARTS, divided

ENDING = ".parquet"
_SHOWN = 5  # names in a message


@dataclass(frozen=True)
class Tables:
    """Files that hold images as rows.

    Attributes:
        source: path of the file or folder, for messages.
        root: the folder that holds the files.
        files: their names, sorted.
        images, labels: names of the columns; empty if they are to be found.
        is_arrow: Arrow streams, not Parquet.
    """

    source: str
    root: str
    files: list[str]
    images: str
    labels: str
    is_arrow: bool = False

    def paths(self) -> list[str]:
        return [os.path.join(self.root, name) for name in self.files]


def find_hugging_face(rest: str) -> Tables:
    """The files of `hf:PATH[:SPLIT[:IMAGES[:LABELS]]]`. Raises DataError if there are none, or several splits."""
    path, (split, *columns) = divided(rest, PARTS[HUGGING_FACE])
    if not os.path.isdir(path):
        problem = "is not a folder" if os.path.exists(path) else "does not exist"
        raise DataError(
            f"{path} {problem}; give {HUGGING_FACE}:FOLDER with what `datasets` saved, or with Parquet files"
        )
    if (saved := _json(path, "dataset_dict.json")) is not None:
        path = os.path.join(path, _chosen(path, split, saved["splits"]))
    elif split and os.path.exists(os.path.join(path, "state.json")):
        raise DataError(f"{path}: has no splits, but {split} is given; leave it out: {HUGGING_FACE}:{path}")
    if (state := _json(path, "state.json")) is not None:
        if state.get("_indices_data_files"):
            raise DataError(
                f"{path}: its rows are in another order than its files; save it again, by datasets 2 or later"
            )
        files = [file["filename"] for file in state["_data_files"]]
        return Tables(path, path, files, *columns, is_arrow=True)
    return _of_hub(path, split, *columns)


def find_parquet(rest: str) -> Tables:
    """The files of `parquet:PATH[:IMAGES[:LABELS]]`. Raises DataError if there are none."""
    path, columns = divided(rest, PARTS[PARQUET])
    if os.path.isfile(path):
        return Tables(path, *_root_and_names([path]), *columns)
    return Tables(path, path, _parquet_files(path), *columns)


def _parquet_files(folder: str) -> list[str]:
    try:
        names = sorted(name for name in os.listdir(folder) if name.lower().endswith(ENDING) and name[0] != ".")
    except FileNotFoundError:
        raise DataError(f"{folder} does not exist; give a Parquet file, or a folder of them") from None
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {reason(error)}; check its permissions") from error
    if not names:
        raise DataError(f"{folder} holds no {ENDING} files; give a Parquet file, or a folder of them")
    return names


def _of_hub(path: str, split: str, images: str, labels: str) -> Tables:
    """Parquet files at any depth of a folder; the split is the start of a file's name, or its folder."""
    splits = defaultdict(list)
    for folder, inner, names in os.walk(path):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in sorted(names):
            if name.lower().endswith(ENDING) and not name.startswith("."):
                splits[_split(os.path.relpath(folder, path), name)].append(os.path.join(folder, name))
    if not splits:
        raise DataError(f"{path}: holds neither what `datasets` saved with save_to_disk nor {ENDING} files")
    files = splits[_chosen(path, split, sorted(splits))]
    if len(folders := {os.path.dirname(file) for file in files}) > 1:
        raise DataError(f"{path}: has this split in {_some(folders)}; give one of these folders")
    return Tables(path, *_root_and_names(files), images, labels)


def _split(folder: str, name: str) -> str:
    """train of train-00000-of-00002.parquet, of train.parquet, and of train/0000.parquet."""
    stem = re.sub(r"-\d{5}-of-\d{5}.*$", "", name[: -len(ENDING)])
    stem = re.sub(r"[-_.]?\d+$", "", stem)
    return stem or (os.path.basename(folder) if folder not in (".", "data") else "train")


def _root_and_names(files: list[str]) -> tuple[str, list[str]]:
    return os.path.dirname(files[0]), [os.path.basename(file) for file in files]


def _chosen(path: str, split: str, there: list[str]) -> str:
    if split in there:
        return split
    if not split and len(there) == 1:
        return there[0]
    problem = f"has no split {split}" if split else "has several splits"
    raise DataError(f"{path}: {problem}; give one of {', '.join(there)}, as {HUGGING_FACE}:{path}:{there[0]}")


def _json(folder: str, name: str) -> dict | None:
    """The content of a file that `datasets` wrote; None if there is none."""
    path = os.path.join(folder, name)
    try:
        with open(path, "rb") as file:
            return json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}; save or copy the folder again") from error


def _some(names: set[str]) -> str:
    shown = sorted(names)[:_SHOWN]
    return ", ".join(shown) + (", ..." if len(names) > _SHOWN else "")
