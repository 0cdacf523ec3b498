"""Which folder is the class of an image, and which folders hold none: one rule, for folders and for tars.

Folders that lead to all images are skipped, and each folder below them is a class. An image belongs to its class at any
depth. Images that lie beside the class folders, or above them, are left out. If no folder has a second one beside it,
the first folder is the only class, and images without a folder have no class.

Names that differ only in Unicode form are one class: macOS may write an accented letter as two characters where Linux
writes one.
"""

import unicodedata
from collections.abc import Mapping
from functools import lru_cache

from ..files.tar_format import text_of

_NOT_FOR_IMAGES = {  # folders in which file systems and storage boxes keep what is damaged, deleted or derived
    *(b"lost+found", b"$recycle.bin", b"system volume information"),
    *(b"@eadir", b"#recycle", b"#snapshot", b"@recycle", b"@recently-snapshot", b"~snapshot"),
}
_SHOWN = 3  # classes in a message


def is_left_alone(name: bytes) -> bool:
    """Whether a file or folder is hidden, or a folder in which storage keeps files that are not the user's."""
    return (name.startswith(b".") and name not in (b".", b"..")) or name.lower() in _NOT_FOR_IMAGES


@lru_cache(1 << 12)  # the images of a folder come one after the other
def lies_in_one_left_alone(folder: bytes) -> bool:
    """Whether any part of a folder's path is left alone."""
    return any(map(is_left_alone, folder.split(b"/")))


def composed(name: bytes) -> bytes:
    """A name in Unicode's form NFC; bytes that are not UTF-8 stay as they are."""
    if name.isascii():
        return name
    text = unicodedata.normalize("NFC", text_of(name))
    return text.encode("utf-8", "surrogateescape")


def classes_of(source: str, images: Mapping[bytes, int]) -> tuple[dict[bytes, bytes | None], list[str]]:
    """The class of each folder with images, and lines for the user.

    Args:
        source: the folder or the tar that holds them.
        images: number of images directly in each folder, by its path; empty for the source itself.

    Returns:
        The name of the class by folder: None where images are left out; where no folder has one, there are no classes
        and nothing is left out.
    """
    parts = {folder: _parts(folder) for folder in images}
    skipped: list[bytes] = []
    while len(names := {path[len(skipped)] for path in parts.values() if len(path) > len(skipped)}) == 1:
        skipped += names
    if not names:  # no folder has a second one beside it
        skipped = []
    depth = len(skipped)
    found = {folder: path[depth] if len(path) > depth else None for folder, path in parts.items()}
    told, where = [], "/".join([source, *map(text_of, skipped)])
    beside = sum(count for folder, count in images.items() if found[folder] is None)
    classes = sorted({name for name in found.values() if name is not None})
    if classes and beside:
        above = " or above it" if depth else ""
        told.append(f"{beside:,} images lie directly in {where}{above}, next to its class folders; they are ignored")
    deeper = [folder for folder, path in parts.items() if len(path) > depth + 1]
    if deeper:
        shown = ", ".join(map(text_of, classes[:_SHOWN]))
        told.append(
            f"{source}: the classes are the folders in {where} ({shown}{', ...' if len(classes) > _SHOWN else ''}); "
            f"{sum(images[folder] for folder in deeper):,} images lie deeper, in folders such as "
            f"{text_of(min(deeper))}"
        )
    return found, told


def _parts(folder: bytes) -> list[bytes]:
    return [part for part in composed(folder).split(b"/") if part not in (b"", b".")]
