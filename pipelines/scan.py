"""Decodes every image of a manifest once and writes down what each is: what training cannot use, and what is odd.

    FOLDER/scan.json       which images are scanned; the rows of others are not continued
    FOLDER/manifest.csv    a row per image, in the manifest's order; COLUMNS
    FOLDER/bad.csv         path and reason of those that cannot be decoded; written at the end
    FOLDER/duplicates.csv  path of each image whose bytes equal those of an earlier one, and that one's

Worker processes decode, one per thread: a file that crashes the decoder ends its worker, not the scan. All that
is said at the end is read from manifest.csv, so a scan that was interrupted ends as one that was not.
"""

import contextlib
import csv
import ctypes
import errno
import fcntl
import hashlib
import io
import json
import mmap
import multiprocessing
import os
import re
import signal
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from .errors import DataError
from .headers import FORMATS, reason
from .manifest import Manifest

COLUMNS = ("path", "label", "width", "height", "format", "colour", "bytes", "digest", "note")
BAD = "bad: "  # begins the note of an image that cannot be used; a kind and details in brackets follow
FILES = ("manifest.csv", "bad.csv", "duplicates.csv")

_DESCRIPTION = "scan.json"
_VERSION = 1  # raise when rows change: those of an older version are not continued
_EXTENSIONS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP", ".bmp": "BMP"}
_CHUNK = 64  # images of a task at most
_REFRESH = 0.2  # seconds between two reports at most
_FILE = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}  # a file's name need not be UTF-8


@dataclass
class Progress:
    """Images done, and how many of them are bad; of `total`."""

    total: int
    done: int = 0
    bad: int = 0


@dataclass
class Summary:
    """What a finished scan found.

    Attributes:
        images, bytes: how many images, and the sum of their files.
        bad: int64, positions in the manifest of the images that cannot be used.
        unread: int64, those of them whose bytes could not be read, which may be the storage's fault.
        reasons: bad images per kind of reason.
        first: path and reason of the first few bad ones.
        notes: usable images per kind of note.
        formats, colours: usable images per format and per colour mode.
        sizes: width and height of the smallest, the median and the largest usable image, by number of pixels.
        duplicates: images whose bytes equal those of an earlier one.
    """

    images: int
    bad: np.ndarray
    unread: np.ndarray
    bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    first: list[tuple[str, str]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    colours: Counter[str] = field(default_factory=Counter)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    duplicates: int = 0


def scan(
    manifest: Manifest,
    folder: str | os.PathLike,
    threads: int | None = None,
    source: str | os.PathLike | None = None,
) -> Iterator[Progress]:
    """Decodes the images that have no row in FOLDER/manifest.csv yet, and appends theirs.

    Yields the progress as rows are written, first with what an earlier scan has left; the same object each time.

    Args:
        manifest: the images.
        folder: where the rows are; it is created. Rows of a scan of the same source whose files have changed
            since are dropped, with a warning.
        threads: worker processes, which are forked; None for one per core. More of them hide the latency of
            network storage.
        source: where the images are from, absolute; None for the manifest's root.

    Raises:
        DataError: the folder cannot be written, holds something else, or another scan is at work there.
        OSError: while iterating, if the disk is full; the rows so far stay and are continued.
    """
    threads = len(os.sched_getaffinity(0)) if threads is None else threads
    if threads < 1:
        raise DataError(f"{threads} threads cannot decode images; use at least 1")
    folder = Path(folder)
    progress = Progress(len(manifest))
    with _rows(folder) as rows:
        _begin(manifest, os.fspath(source or manifest.root), folder, rows)
        _go_on(manifest, rows, progress)
        yield progress
        for done in _results(manifest, progress.done, threads):
            if done:
                content, images, bad = done
                _append(rows, content)
                progress.done += images
                progress.bad += bad
            yield progress


def summarize(manifest: Manifest, folder: str | os.PathLike, first: int = 5) -> Summary:
    """Reads the rows of a finished scan and writes bad.csv and duplicates.csv beside them; `first` as in `Summary`."""
    folder = Path(folder)
    bad: list[int] = []
    unread: list[int] = []
    found = Summary(images=len(manifest), bad=np.zeros(0, np.int64), unread=np.zeros(0, np.int64))
    sides = np.zeros((len(manifest), 2), np.int32)
    digests = np.zeros(len(manifest), np.uint64)
    with open(folder / "manifest.csv", **_FILE) as file, _whole(folder / "bad.csv") as draft:
        draft.write(_line(("path", "reason")))
        for index, row in enumerate(csv.DictReader(file)):
            found.bytes += int(row["bytes"] or 0)
            if row["bytes"] and int(row["bytes"]):
                digests[index] = int(row["digest"], 16)
            if row["note"].startswith(BAD):
                reason = row["note"].removeprefix(BAD)
                bad.append(index)
                unread += [] if row["bytes"] else [index]
                found.reasons[_kind(reason)] += 1
                found.first += [(row["path"], reason)] if len(bad) <= first else []
                draft.write(_line((row["path"], reason)))
                continue
            found.formats[row["format"]] += 1
            found.colours[row["colour"]] += 1
            found.notes.update(_kind(note) for note in row["note"].split("; ") if note)
            sides[index] = int(row["width"]), int(row["height"])
    found.bad, found.unread = np.array(bad, np.int64), np.array(unread, np.int64)
    found.sizes = _spread(sides[sides[:, 0] > 0])
    found.duplicates = _write_duplicates(manifest, digests, folder / "duplicates.csv")
    return found


def _kind(note: str) -> str:
    return note.partition(" (")[0]


def _spread(sides: np.ndarray) -> list[tuple[int, int]]:
    if not len(sides):
        return []
    order = np.argsort(sides.prod(axis=1, dtype=np.int64), kind="stable")
    return [tuple(sides[order[place]].tolist()) for place in (0, len(order) // 2, -1)]


def _write_duplicates(manifest: Manifest, digests: np.ndarray, path: Path) -> int:
    """Writes who equals whom; 0 is the digest of files without content. Returns how many equal an earlier one."""
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    original = first[inverse.reshape(-1)]
    later = np.flatnonzero((original != np.arange(len(digests))) & (digests != 0))
    with _whole(path) as draft:
        draft.write(_line(("path", "same_as")))
        for index in later.tolist():
            draft.write(_line((_name(manifest, index), _name(manifest, int(original[index])))))
    return len(later)


def _name(manifest: Manifest, index: int) -> str:
    return manifest.path(index).removeprefix(os.path.join(manifest.root, ""))


# Files: rows are appended, everything else is replaced as a whole.


@contextlib.contextmanager
def _rows(folder: Path) -> Iterator[io.FileIO]:
    """The file of rows, for this scan alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = [name for name in FILES if (folder / name).exists() and (folder / name).stat().st_size]
        if taken and not (folder / _DESCRIPTION).exists():
            raise DataError(f"{folder} holds a {taken[0]} that no scan wrote; give another folder")
        file = open(folder / "manifest.csv", "ab", buffering=0)  # noqa: SIM115  closed below
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        raise DataError(f"{folder} cannot be written: {reason(error)}; give another folder") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{folder}: another scan is writing there; wait for it, or give another folder") from None
        except OSError:  # a file system without locks
            pass
        yield file


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[IO[str]]:
    """A text file that is replaced as a whole, or not at all."""
    draft = path.with_name(f".{path.name}.unfinished")
    try:
        with open(draft, "w", **_FILE) as file:
            yield file
        os.replace(draft, path)
    except OSError as error:
        error.filename = error.filename or os.fspath(path)  # a full disk names no file
        raise
    finally:
        draft.unlink(missing_ok=True)


def _begin(manifest: Manifest, source: str, folder: Path, rows: io.FileIO) -> None:
    """Drops what a scan of other files has left, and notes which are scanned now."""
    now = {"version": _VERSION, "path": source, "fingerprint": manifest.fingerprint, "images": len(manifest)}
    before: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError, ValueError):
        before = json.loads((folder / _DESCRIPTION).read_text())
    state = ("version", "fingerprint", "images")
    if before and all(before.get(key) == now[key] for key in state):
        return
    if before and before.get("path") != now["path"]:
        raise DataError(f"{folder} holds the scan of {before.get('path')}; give another folder")
    if before:
        warnings.warn(f"the images have changed since the scan in {folder}; it starts anew", stacklevel=4)
    rows.truncate(0)
    for name in FILES[1:]:
        (folder / name).unlink(missing_ok=True)
    with _whole(folder / _DESCRIPTION) as draft:
        json.dump(now, draft, indent=2)


def _go_on(manifest: Manifest, rows: io.FileIO, progress: Progress) -> None:
    """Counts the complete rows, and cuts off what follows them: the scan may have been killed as it wrote."""
    end = read = 0

    def lines() -> Iterator[str]:
        nonlocal read
        with open(rows.name, "rb") as file:
            for line in file:
                read += len(line)
                if not line.endswith(b"\n"):
                    return
                yield line.decode(_FILE["encoding"], _FILE["errors"])

    with contextlib.suppress(csv.Error):
        for number, row in enumerate(csv.reader(lines())):
            name = "path" if not number else _name(manifest, number - 1) if number <= len(manifest) else None
            if len(row) != len(COLUMNS) or row[0] != name:
                break
            end = read
            progress.done = number
            progress.bad += row[-1].startswith(BAD)
    rows.truncate(end)
    if not end:
        _append(rows, _csv([COLUMNS]))


def _append(rows: io.FileIO, content: bytes) -> None:
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[rows.write(rest) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, rows.name) from error  # which the system's lacks


def _csv(rows: Iterable[Iterable[Any]]) -> bytes:
    return "".join(map(_line, rows)).encode(_FILE["encoding"], _FILE["errors"])


def _line(row: Iterable[Any]) -> str:
    text = io.StringIO(newline="")
    # Before Python 3.13 the writer quotes a carriage return only where it ends the lines.
    csv.writer(text, lineterminator="\r\n").writerow(row)
    return text.getvalue().removesuffix("\r\n") + "\n"


# Workers: forked, because they then share the manifest's memory. A task is a run of images.

_Task = tuple[int, int]  # first position, and the one behind the last
_Result = tuple[bytes, int, int]  # the rows as CSV, how many, how many are bad


class _Worker:
    def __init__(self, manifest: Manifest, inherited: list[Connection]) -> None:
        context = multiprocessing.get_context("fork")
        self.task: _Task | None = None
        self.image = ctypes.c_int64.from_buffer(mmap.mmap(-1, 8))  # shared, which one it is at; -1: none
        self.image.value = -1
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_work, args=(manifest, theirs, [*inherited, self.connection], self.image), daemon=True
        )
        self.process.start()
        theirs.close()

    def give(self, task: _Task, crashing: dict[int, str]) -> None:
        self.task = task
        with contextlib.suppress(BrokenPipeError):  # it has died, which shows when its result is read
            self.connection.send((task, {image: why for image, why in crashing.items() if task[0] <= image < task[1]}))

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


def _results(manifest: Manifest, start: int, threads: int) -> Iterator[_Result | None]:
    """Rows of the images from `start` on, in order; None where there is nothing new for a while."""
    count = len(manifest) - start
    if not count:
        return
    import nvidia.dali.fn
    import nvidia.dali.pipeline  # noqa: F401  once, for all workers

    threads = min(threads, count)
    size = max(1, min(_CHUNK, count // (8 * threads)))
    tasks = deque((first, min(first + size, len(manifest))) for first in range(start, len(manifest), size))
    window = 4 * threads * size  # how far a slow task may fall behind the others, whose rows wait for it
    finished: dict[int, _Result] = {}
    crashing: dict[int, str] = {}  # images that crash the decoder, and how
    crashed_once: set[int] = set()
    workers: list[_Worker] = []
    try:
        for _ in range(threads):
            workers.append(_Worker(manifest, [other.connection for other in workers]))
        while start < len(manifest):
            for worker in workers:
                if worker.task is None and tasks and tasks[0][0] < start + window:
                    worker.give(tasks.popleft(), crashing)
            ready = wait([worker.connection for worker in workers if worker.task], _REFRESH)
            for place, worker in enumerate(workers):
                if worker.connection not in ready:
                    continue
                try:
                    result = worker.connection.recv()
                except (EOFError, ConnectionResetError):
                    _bury(worker, crashed_once, crashing)
                    tasks.appendleft(worker.task)
                    others = [other.connection for other in workers if other is not worker]
                    workers[place] = _Worker(manifest, others)
                    continue
                if isinstance(result, str):
                    raise RuntimeError(f"a scan's worker failed:\n{result}")
                finished[worker.task[0]] = result
                worker.task = None
            if start not in finished:
                yield None
            while start in finished:
                result = finished.pop(start)
                start += result[1]
                yield result
    finally:
        for worker in workers:
            worker.end()


def _bury(worker: _Worker, crashed_once: set[int], crashing: dict[int, str]) -> None:
    """Notes the image at which a worker has died; only the second time is the image blamed for it."""
    worker.end()
    image, status = worker.image.value, worker.process.exitcode
    if image < 0 or status is None or status >= 0:
        raise RuntimeError(f"a scan's worker ended with status {status}, at no image")
    if image in crashed_once:
        killed = ", perhaps for want of memory" if -status == signal.SIGKILL else ""
        crashing[image] = f"crashes the decoder ({signal.Signals(-status).name}{killed})"
    crashed_once.add(image)


def _work(manifest: Manifest, connection: Connection, inherited: list[Connection], image: Any) -> None:
    """Of a worker: takes tasks and answers with rows, until its connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that gives the tasks
    for other in inherited:
        other.close()  # so that each worker ends when the scan is killed
    try:
        decoder = _Decoder()
        warnings.simplefilter("ignore")
        while True:
            try:
                (first, end), crashing = connection.recv()
            except EOFError:
                return
            rows = []
            for image.value in range(first, end):
                rows.append(_row(manifest, image.value, decoder, crashing.get(image.value)))
            image.value = -1
            connection.send((_csv(rows), len(rows), sum(row[-1].startswith(BAD) for row in rows)))
    except BrokenPipeError:
        return
    except Exception:
        connection.send(traceback.format_exc())


class _Decoder:
    """The decoder of training, on one image at a time, and what its libraries say about it.

    One at a time costs a tenth more than batches do, and it is certain at which image it fails or crashes.
    """

    def __init__(self) -> None:
        self._said = os.memfd_create("said")
        os.dup2(self._said, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        self._pipeline = self._build()

    @staticmethod
    def _build() -> Any:
        from nvidia.dali import fn, types
        from nvidia.dali.pipeline import Pipeline

        pipeline = Pipeline(1, 1, None, prefetch_queue_depth=1, exec_async=False, exec_pipelined=False)
        with pipeline:
            encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
            image = fn.decoders.image(encoded, device="cpu", output_type=types.RGB, adjust_orientation=False)
            pipeline.set_outputs(image)
        pipeline.build()
        return pipeline

    def decode(self, data: bytes) -> tuple[tuple[int, int], list[str]]:
        """Width, height and what was said on stderr. Raises RuntimeError with what was said there, a line."""
        os.ftruncate(self._said, 0)
        os.lseek(self._said, 0, os.SEEK_SET)
        self._pipeline.feed_input("encoded", [np.frombuffer(data, np.uint8)])
        try:
            (decoded,) = self._pipeline.run()
        except RuntimeError as error:
            self._pipeline = self._build()  # the old one is of no more use
            lines = self._lines()
            said = [line for line in lines if "[ERROR" in line] or lines or ["the decoder refuses it"]
            raise RuntimeError(re.sub(r"^(\[[^]]*\]\s*)+", "", said[0])) from error
        height, width, _ = decoded[0].shape()
        return (width, height), self._lines()

    def _lines(self) -> list[str]:
        size = os.lseek(self._said, 0, os.SEEK_CUR)
        if not size:
            return []
        text = os.pread(self._said, min(size, 4096), 0).decode(errors="replace")
        return re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()


# One image.


def _row(manifest: Manifest, index: int, decoder: _Decoder, crash: str | None) -> list[Any]:
    facts = dict.fromkeys(COLUMNS, "")
    facts["path"] = _name(manifest, index)
    if manifest.labels is not None:
        facts["label"] = manifest.classes[manifest.labels[index]]
    try:
        data = manifest.read(index)
    except FileNotFoundError:
        facts["note"] = f"{BAD}missing"
    except OSError as error:
        facts["note"] = f"{BAD}cannot be read ({reason(error)})"
    else:
        facts |= {"bytes": len(data), "digest": hashlib.blake2b(data, digest_size=8).hexdigest()}
        defect = crash or _defect(data, facts, decoder)
        if defect:
            facts["note"] = BAD + defect
    return list(facts.values())


def _defect(data: bytes, facts: dict[str, Any], decoder: _Decoder) -> str | None:
    """Fills in what the header says, and notes; returns why the image cannot be used, None if it can."""
    if not data:
        return "empty"
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        return _header_defect(data, error)
    with image:
        facts |= {"width": image.width, "height": image.height, "format": image.format, "colour": _colour(image)}
        try:
            size, said = decoder.decode(data)
        except RuntimeError as error:
            return _body_defect(image, data, str(error))
        if size != image.size:
            return f"damaged (decodes to {size[0]}x{size[1]}, its header says {image.width}x{image.height})"
        facts["note"] = "; ".join(_notes(image, data, facts["path"], said))
    return None


def _header_defect(data: bytes, error: Exception) -> str:
    if isinstance(error, Image.DecompressionBombError):
        return f"too large ({error})"
    if "truncated" in str(error).lower() or _cut_short(data):
        return "truncated (in its header)"
    with contextlib.suppress(Exception), Image.open(io.BytesIO(data)) as image:
        return f"of another format ({image.format})"
    return "not an image" if isinstance(error, UnidentifiedImageError) else f"damaged ({error})"


def _body_defect(image: Image.Image, data: bytes, said: str) -> str:
    """What is wrong with an image that the decoder refuses; Pillow says more clearly what it is."""
    try:
        image.load()
    except Exception as error:  # of many kinds, for Pillow's readers trust the file
        if "truncated" in str(error):
            line = re.search(r"Stopped at line (\d+)/(\d+)", said)
            return "truncated" + (f" (at row {line[1]} of {line[2]})" if line else "")
        said = str(error)
    return "truncated (no end marker)" if _cut_short(data) else f"damaged ({said.strip()})"


def _cut_short(data: bytes) -> bool:
    """Whether the end that the format requires is missing."""
    if data.startswith(b"\x89PNG"):
        return b"IEND" not in data[-64:]
    return data.startswith(b"RIFF") and len(data) < 8 + int.from_bytes(data[4:8], "little")


def _colour(image: Image.Image) -> str:
    """Pillow's name of the colour mode; YCCK for CMYK that is stored so."""
    return "YCCK" if image.mode == "CMYK" and image.info.get("adobe_transform") == 2 else image.mode


def _notes(image: Image.Image, data: bytes, path: str, said: list[str]) -> Iterator[str]:
    """What is odd about an image that decodes."""
    extension = os.path.splitext(path)[1]
    kind = "JPEG" if image.format == "MPO" else image.format  # JPEG files with several pictures
    if _EXTENSIONS.get(extension.lower(), kind) != kind:
        yield f"{image.format} named {extension}"
    for line in said:
        if line.startswith("Corrupt JPEG data: "):
            what = re.sub(r"^\d+ ", "", line.removeprefix("Corrupt JPEG data: "))
            yield f"damaged but decodes ({what})"
            break
    else:
        if kind == "JPEG" and data.rfind(b"\xff\xd9") < 0:
            yield "no end marker"
    if image.mode == "CMYK":
        yield _colour(image)
    if image.format == "PNG" and data[24] == 16:  # the bit depth, which Pillow does not tell for colour
        yield "16 bits per channel"
    # Tags and frame tables of damaged files break Pillow in many ways, and training reads neither.
    with contextlib.suppress(Exception):
        if image.getexif().get(0x0112, 1) not in (0, 1):
            yield "EXIF rotation ignored"
    with contextlib.suppress(Exception):
        if getattr(image, "n_frames", 1) > 1:
            yield "several pictures in one file"
