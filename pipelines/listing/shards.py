"""Lists the images of tar shards: from the cache, from the index next to the shards, or from the tar headers.

The headers are scanned once. Every member with the extension of an image is an image. Its label is in the file with
the longest key that is a prefix of its name: `a/7.jpg` and `a/7.v2.jpg` both find `a/7.cls` (an integer) or `a/7.json`
(with the key `label` or `cls`), but the latter would prefer `a/7.v2.cls`. In a WebDataset sample, an image `a/7.jpg`
next to files of other kinds, `a/7.seg.png` is not another image but a part of the sample.
"""

import json
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, compress
from pathlib import Path

import numpy as np

from ..errors import DataError
from ..files.headers import ENDINGS, EXTENSIONS
from ..files.tar_format import member, members, text_of
from ..shards.archives import CLASSES, Shards
from ..shards.index import INDEX, Index, load, missing
from ..storage import joined
from . import marks
from .cache import fits
from .classes import classes_of, lies_in_one_left_alone
from .labels import name_labels, number_labels
from .left_out import ending as ending_of
from .left_out import from_array, ignored, runs_ignored, tell, to_array

_THREADS = 8  # hides the latency of network storage
LEFT_OUT = "left_out"  # array next to the index in the cache: lines for the user; caches without them are older


def list_shards(
    source: str, shards: Shards, content: dict[str, np.ndarray]
) -> tuple[Index, dict[str, np.ndarray], bool]:
    """The index of some shards, the arrays that came with it, and whether both were cached.

    Warns of members that are ignored.

    Args:
        source: the folder, or the one shard.
        content: cached arrays of these shards.

    Raises:
        DataError: as `_walk` and `Shards.classes`; or shards that the index lists are missing.
    """
    index, told = index_in(content, shards), from_array(content.get(LEFT_OUT))
    if index is not None and told is not None:
        tell(told)
        return index, content, True
    beside = Path(shards.root, INDEX)
    if os.path.isdir(source) and (gone := missing(beside, shards)):
        raise DataError(
            f"{os.path.join(shards.root, gone[0])}: missing; {len(gone)} of the shards that {beside} lists are gone; "
            "copy them again, or remove that file to continue without them"
        )
    content = load(beside, shards) or {}
    index = index_in(content, shards)
    if index is not None:  # `data shard` wrote the shards, which hold nothing else
        return index, {**content, LEFT_OUT: to_array([])}, False
    if os.path.isdir(source) and os.path.exists(beside):
        warnings.warn(f"{beside} is damaged or belongs to other shards; it is ignored", stacklevel=3)
    index, told = _from_headers(source, shards)
    tell(told)
    return index, {LEFT_OUT: to_array(told)}, False


def index_in(content: dict[str, np.ndarray], shards: Shards) -> Index | None:
    """The cached index, if it and the other cached arrays are valid."""
    with suppress(KeyError, SystemError):
        index = Index(**{key: content[key] for key in Index.__dataclass_fields__})
        if index.fits(shards) and fits(content, len(index.shard)):
            index.classes.tolist()  # raises SystemError for invalid characters
            return index
    return None


def _from_headers(source: str, shards: Shards) -> tuple[Index, list[str]]:
    """The index of some shards, from their headers, and lines for the user about what is ignored."""
    found, told, by_folder = _walk(source, shards)
    names = [os.fsencode(tar) + b"/" + name for tar, one in zip(shards.tars, found, strict=True) for name in one.names]
    texts = [text for one in found for text in one.labels]

    def place(image: int) -> str:
        return os.fsdecode(os.path.join(os.fsencode(shards.root), names[image]))

    labels, classes = name_labels(texts) if by_folder else number_labels(texts, place)
    given = shards.classes()
    if labels is not None and given is not None:
        if labels.max() >= len(given):
            worst = int(labels.argmax())
            raise DataError(
                f"{place(worst)}: label {labels[worst]}, but {CLASSES} next to the shards names {len(given)} "
                "classes; add the missing names"
            )
        classes = given
    counts = [len(one.names) for one in found]
    joined_names, offsets = joined(names)
    index = Index(
        names=joined_names,
        offsets=offsets,
        shard=np.repeat(np.arange(len(found), dtype=np.int32), counts),
        at=np.concatenate([np.array(one.at, np.int64) for one in found]),
        length=np.concatenate([np.array(one.length, np.int64) for one in found]),
        labels=np.zeros(0, np.int64) if labels is None else labels,
        classes=np.array(classes, np.str_),
    )
    return index, told


@dataclass
class _Found:
    """Images of one shard: names, offsets, lengths in bytes and texts of labels; and what is ignored."""

    names: list[bytes] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    labels: list[bytes] = field(default_factory=list)
    left_out: Counter[bytes] = field(default_factory=Counter)
    runs: list[bytes] = field(default_factory=list)

    def keep(self, stays: list[bool]) -> None:
        """Drops the images that do not stay."""
        for values in (self.names, self.at, self.length):
            values[:] = list(compress(values, stays))


def _walk(source: str, shards: Shards) -> tuple[list[_Found], list[str], bool]:
    """Images of every shard, from the tar headers, lines for the user, and whether the labels are folders.

    If nothing is labelled, the folders are the classes, as in the tree that was packed.

    Raises:
        DataError: a shard is compressed, cut off or damaged, has two images with one key or none at all, or only
            some images have labels.
    """
    paths = [shards.path(number) for number in range(len(shards.tars))]
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(_walk_shard, paths))
    for path, one in zip(paths, found, strict=True):
        if bool(one.labels) != bool(found[0].labels):
            which, other = (path, paths[0]) if not one.labels else (paths[0], path)
            raise DataError(f"{which}: its images have no labels, but those of {other} do; label all images or none")
    told, by_folder = runs_ignored(source, [run for one in found for run in one.runs]), False
    if not found[0].labels:
        folders = [[name.rpartition(b"/")[0] for name in one.names] for one in found]
        of, said = classes_of(source, Counter(chain.from_iterable(folders)))
        told += said
        by_folder = any(of.values())
        if by_folder:
            for one, names in zip(found, folders, strict=True):
                labels = [of[folder] for folder in names]
                one.keep([label is not None for label in labels])
                one.labels = [label for label in labels if label is not None]
    return found, told + ignored(source, sum((one.left_out for one in found), Counter())), by_folder


def _walk_shard(path: str) -> _Found:
    found = _Found()
    keys: list[bytes] = []  # of the images: names without extensions
    labels: dict[bytes, dict[bytes, bytes | None]] = {b"cls": {}, b"json": {}}
    unread: dict[tuple[bytes, bytes], tuple[bytes, bytes]] = {}  # files with two dots that may hold a label
    seen, others = set(), set()  # others: keys of files that are not images
    marked = defaultdict(set)  # by folder: the files that a run's folder has
    for name, at, length, link, content in members(path):
        folder, slash, base = name.rpartition(b"/")
        stem, dot, ending = base.rpartition(b".")
        if base.startswith(b".") or lies_in_one_left_alone(folder):
            continue
        key, ending = folder + slash + stem, ending.lower()
        is_image = bool(dot) and b"." + ending in ENDINGS
        if not is_image:
            others.add(folder + slash + base.partition(b".")[0])
            if base in marks.OF_A_RUN:
                marked[folder].add(base)
            if not dot or ending not in labels:
                found.left_out[ending_of(base)] += 1
                continue
        if link:
            raise DataError(f"{member(path, name)}: a link; pack it with `tar --dereference --hard-dereference`")
        mark = (key, b"" if is_image else ending)
        if mark in seen:
            what = "image" if is_image else f".{ending.decode()} file"
            raise DataError(f"{member(path, name)}: the second {what} with the key {text_of(key)}; rename one of them")
        seen.add(mark)
        if is_image:
            keys.append(key)
            found.names.append(name)
            found.at.append(at)
            found.length.append(length)
        elif b"." in stem:
            unread[key, ending] = name, content()
        elif (label := _label(ending, content(), path, name)) is not None:
            labels[ending][key] = label
    found.runs = [folder for folder, files in marked.items() if files == marks.OF_A_RUN]
    if found.runs:
        stays = [not any(key.startswith(run and run + b"/") for run in found.runs) for key in keys]
        found.keep(stays)
        keys = list(compress(keys, stays))
    dotted = any(b"." in key.rpartition(b"/")[2] for key in keys)
    if dotted:
        keys = _without_parts(found, keys, seen, others)
    if not found.names:
        raise DataError(f"{path}: holds no images ({', '.join(EXTENSIONS)}); remove it, or pack it again")

    def text(key: bytes) -> bytes | None:
        for shorter in _shorter(key) if dotted else (key,):
            for ending in (b"cls", b"json"):
                if (shorter, ending) in unread:
                    name, content = unread.pop((shorter, ending))
                    labels[ending][shorter] = _label(ending, content, path, name)
                if (label := labels[ending].get(shorter)) is not None:
                    return label
        return None

    texts = [text(key) for key in keys]
    found.left_out.update(ending_of(name) for name, _ in unread.values())
    found.labels = [label for label in texts if label is not None]
    if found.labels and len(found.labels) < len(keys):
        bare = found.names[texts.index(None)]
        count = f"{len(found.labels)} of {len(keys)} images have one"
        raise DataError(f"{member(path, bare)}: has no label (.cls or .json), but {count}; label all images or none")
    return found


def _shorter(key: bytes) -> Iterator[bytes]:
    """A key, then the key without its last part behind a dot, and so on."""
    folder, slash, stem = key.rpartition(b"/")
    while stem:
        yield folder + slash + stem
        stem = stem.rpartition(b".")[0]


def _without_parts(found: _Found, keys: list[bytes], seen: set[tuple[bytes, bytes]], others: set[bytes]) -> list[bytes]:
    """Removes images that are parts of a WebDataset sample; returns the keys of the others."""
    stays = []
    for key in keys:
        *_, first = _shorter(key)
        stays.append(key == first or (first, b"") not in seen or first not in others)
    if all(stays):
        return keys
    for name, stay in zip(found.names, stays, strict=True):
        if not stay:
            found.left_out[b"." + name.rpartition(b"/")[2].partition(b".")[2].lower()] += 1
    found.keep(stays)
    return list(compress(keys, stays))


def _label(ending: bytes, content: bytes, path: str, name: bytes) -> bytes | None:
    """Text of a label; None for a .json file without one."""
    if ending == b"cls":
        label = content.strip()
        if not label.isdigit():
            said = text_of(label[:20]) or "nothing"
            raise DataError(f"{member(path, name)}: says {said}; a .cls file must hold an integer of at least 0")
        return label
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{member(path, name)}: not valid JSON ({error}); repair or remove it") from error
    value = next((tree[key] for key in ("label", "cls") if key in tree), None) if isinstance(tree, dict) else None
    if value is None:
        return None
    if isinstance(value, (int, str)) and not isinstance(value, bool) and (text := str(value).strip()):
        with suppress(UnicodeEncodeError):  # JSON can write half a character
            return text.encode("utf-8", "surrogateescape")
    raise DataError(f"{member(path, name)}: its label is {value!r}; it must be an integer or a name")
