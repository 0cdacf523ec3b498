"""Lists the images of a folder: a tree with a folder per class, or a flat folder."""

import errno
import os
from collections import Counter

from ..errors import DataError
from ..files.headers import ENDINGS, EXTENSIONS, reason
from ..files.slow_storage import spread
from . import marks
from .classes import classes_of, is_left_alone
from .left_out import ending, ignored, runs_ignored, tell

TABLES = {b".arrow", b".parquet"}


def list_folder(root: str) -> tuple[list[str], list[int], list[bytes]]:
    """Class names (none for a flat folder), images of each, and all names by class; warns of what is ignored."""
    base, runs = os.fsencode(root), []
    inner, flat, others = _entries(base, b"", runs)
    if runs:
        raise DataError(f"{root} is the folder of a run, not of training images; give another folder")
    trees = spread(lambda folder: _list_tree(base, folder, runs), sorted(inner))
    folders = {b"": flat, **{folder: names for found, _ in trees for folder, names in found.items()}}
    folders = {folder: names for folder, names in folders.items() if names}
    others = sum((counts for _, counts in trees), others)
    if not folders:
        raise DataError(_no_image(root, others))
    of, told = classes_of(root, {folder: len(names) for folder, names in folders.items()})
    tell([*runs_ignored(root, runs), *told, *ignored(root, others)])
    counts: Counter[bytes] = Counter()
    for folder, name in of.items():
        if name is not None:
            counts[name] += len(folders[folder])
    if not counts:
        return [], [], flat
    classes = sorted(counts)
    places = sorted((name, folder) for folder, name in of.items() if name is not None)
    names = [image for _, folder in places for image in folders[folder]]
    return list(map(os.fsdecode, classes)), [counts[name] for name in classes], names


def _list_tree(base: bytes, folder: bytes, runs: list[bytes]) -> tuple[dict[bytes, list[bytes]], Counter[bytes]]:
    """The images in a folder and in each one below it, sorted, and counts of other files.

    Folders of runs are skipped and added to `runs`.
    """
    waiting, done, seen, others = [folder], {}, set(), Counter()
    while waiting:
        here = waiting.pop()
        try:
            state = os.stat(os.path.join(base, here))
        except OSError as error:
            raise DataError(_unreadable(os.fsdecode(os.path.join(base, here)), error)) from error
        if (state.st_dev, state.st_ino) in seen:  # a link that leads back up
            continue
        seen.add((state.st_dev, state.st_ino))
        inner, done[here], kinds = _entries(base, here, runs)
        others += kinds
        waiting += [os.path.join(here, name) for name in inner]
    return done, others


def _entries(base: bytes, folder: bytes, runs: list[bytes]) -> tuple[list[bytes], list[bytes], Counter[bytes]]:
    """Sub-folders and images of one folder, the images sorted, and its other files by kind; of a run's, nothing."""
    folders, images, others, marked = [], [], Counter(), set()
    path = os.path.join(base, folder) if folder else base
    prefix = os.path.join(folder, b"")
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith(b"."):
                    continue
                if _is_folder(entry):
                    if not is_left_alone(name):
                        folders.append(name)
                elif name.lower().endswith(ENDINGS):
                    images.append(prefix + name)
                else:
                    if name in marks.OF_A_RUN:
                        marked.add(name)
                    others[ending(name)] += 1
    except OSError as error:
        raise DataError(_unreadable(os.fsdecode(path), error)) from error
    if marked and marked == marks.OF_A_RUN:
        runs.append(folder)
        return [], [], Counter()
    images.sort()
    return folders, images, others


def _is_folder(entry: os.DirEntry) -> bool:
    """Whether an entry is a folder or a link to one. Raises OSError if that is unknown and it may be a folder."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP and not entry.name.lower().endswith(ENDINGS):
            raise
        return False


def holds_images(root: str) -> bool:
    """Whether a folder holds an image, at any depth."""
    for _, folders, files in os.walk(os.fsencode(root), followlinks=False):
        if marks.OF_A_RUN and marks.OF_A_RUN.issubset(files):
            folders.clear()
            continue
        folders[:] = [name for name in folders if not is_left_alone(name)]
        if any(name.lower().endswith(ENDINGS) and not name.startswith(b".") for name in files):
            return True
    return False


def _no_image(root: str, others: Counter[bytes]) -> str:
    wanted = f"it must hold {', '.join(EXTENSIONS)} files, or one folder of them per class, or .tar shards"
    if not others:
        return f"{root} holds no files; {wanted}"
    kinds = ", ".join(os.fsdecode(kind) or "no extension" for kind, _ in others.most_common(3))
    if others.keys() & TABLES:
        wanted = f"give hf:{root} if `datasets` saved it or it is of the hub, or parquet:{root}"
    return f"{root} holds no images, only {others.total()} other files ({kinds}); {wanted}"


def _unreadable(folder: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{folder} does not exist; give a folder of images, or one with a folder of images per class"
    if isinstance(error, NotADirectoryError):
        return f"{folder} is a file, not a folder; give the folder that holds the images, or open it with Manifest.open"
    return f"{folder} cannot be listed: {reason(error)}; check its permissions"
