"""Decodes every image of a manifest once, and records which ones training cannot use and which are unusual.

Worker processes decode, one per thread: a file that crashes the decoder ends its worker, not the scan. Workers are
forked, so that they share the manifest's memory. A task is a range of images.
"""

import contextlib
import ctypes
import hashlib
import mmap
import multiprocessing
import os
import signal
import traceback
import warnings
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ..cores import usable_cores
from ..errors import DataError
from ..files.headers import reason
from ..manifest import Manifest
from ..reading.timed import TimedReader
from .decoder import Decoder
from .defects import find_defect
from .files import BAD, COLUMNS, append, as_csv, begin, go_on, name_of, open_rows

_CHUNK = 64  # largest number of images in a task
_REFRESH = 0.2  # longest time between two reports, seconds

Task = tuple[int, int]  # first position, and the position after the last
Result = tuple[bytes, int, int]  # the rows as CSV, how many, how many are bad


@dataclass
class Progress:
    """Number of images done, out of `total`, and how many of them are bad."""

    total: int
    done: int = 0
    bad: int = 0


def scan(
    manifest: Manifest,
    folder: str | os.PathLike,
    threads: int | None = None,
    source: str | os.PathLike | None = None,
    timeout: float = 60.0,
) -> Generator[Progress, None, None]:
    """Decodes the images that have no row in FOLDER/manifest.csv yet, and appends theirs.

    Yields the progress, always the same object, as rows are written; first with the rows of an earlier scan.

    Args:
        manifest: the images.
        folder: folder of the rows, created if it does not exist. If the files of the source have changed since an
            earlier scan, its rows are dropped with a warning.
        threads: number of worker processes, which are forked; None for one per core. More of them hide the latency
            of network storage.
        source: absolute path of the images; None for the manifest's root.
        timeout: seconds after which a file that does not answer counts as bad.

    Raises:
        DataError: the folder cannot be written, holds something else, or another scan is writing there;
            while iterating, the storage stops answering.
        OSError: while iterating, if the disk is full; a later scan continues the rows.
    """
    folder = Path(folder)
    progress = Progress(len(manifest))
    with open_rows(folder) as rows:
        begin(manifest, os.fspath(source or manifest.root), folder, rows)
        progress.done, progress.bad = go_on(manifest, rows)
        yield progress
        for done in _results(manifest, progress.done, threads or usable_cores(), timeout):
            if done:
                content, images, bad = done
                append(rows, content)
                progress.done += images
                progress.bad += bad
            yield progress


class _Worker:
    def __init__(self, manifest: Manifest, inherited: list[Connection], timeout: float) -> None:
        context = multiprocessing.get_context("fork")
        self.task: Task | None = None
        # Shared with the worker: its current image; -1 for none.
        self.image = ctypes.c_int64.from_buffer(mmap.mmap(-1, 8))
        self.image.value = -1
        self.connection, theirs = context.Pipe()
        arguments = manifest, theirs, [*inherited, self.connection], self.image, timeout
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def give(self, task: Task, crashing: dict[int, str]) -> None:
        self.task = task
        with contextlib.suppress(BrokenPipeError):  # the worker has died, which shows when its result is read
            self.connection.send((task, {image: why for image, why in crashing.items() if task[0] <= image < task[1]}))

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


def _results(manifest: Manifest, start: int, threads: int, timeout: float) -> Iterator[Result | None]:
    """Rows of the images from `start` on, in order; yields None while there is nothing new."""
    count = len(manifest) - start
    if not count:
        return
    import nvidia.dali.fn
    import nvidia.dali.pipeline  # noqa: F401  once, for all workers

    threads = min(threads, count)
    size = max(1, min(_CHUNK, count // (8 * threads)))
    tasks = deque((first, min(first + size, len(manifest))) for first in range(start, len(manifest), size))
    window = 4 * threads * size  # how many images the others may be ahead of a slow task
    finished: dict[int, Result] = {}
    crashing: dict[int, str] = {}  # images that crash the decoder, and how
    crashed_once: set[int] = set()
    workers: list[_Worker] = []
    try:
        for _ in range(threads):
            workers.append(_Worker(manifest, [other.connection for other in workers], timeout))
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
                    workers[place] = _Worker(manifest, others, timeout)
                    continue
                if isinstance(result, DataError):
                    raise result
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
    """Records the image at which a worker died; the image counts as bad when it happens twice."""
    worker.end()
    image, status = worker.image.value, worker.process.exitcode
    if image < 0 or status is None or status >= 0:
        raise RuntimeError(f"a scan's worker ended with status {status} outside of any image")
    if image in crashed_once:
        killed = ", perhaps out of memory" if -status == signal.SIGKILL else ""
        crashing[image] = f"crashes the decoder ({signal.Signals(-status).name}{killed})"
    crashed_once.add(image)


def _work(manifest: Manifest, connection: Connection, inherited: list[Connection], image: Any, timeout: float) -> None:
    """Main function of a worker: takes tasks and returns rows until its connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    for other in inherited:
        other.close()  # so that each worker ends when the scan is killed
    try:
        decoder, reader = Decoder(), TimedReader(manifest, timeout)
        warnings.simplefilter("ignore")
        while True:
            try:
                (first, end), crashing = connection.recv()
            except EOFError:
                return
            rows = []
            for image.value in range(first, end):
                rows.append(_row(reader, image.value, decoder, crashing.get(image.value)))
            image.value = -1
            connection.send((as_csv(rows), len(rows), sum(row[-1].startswith(BAD) for row in rows)))
    except BrokenPipeError:
        return
    except DataError as error:
        connection.send(error)
    except Exception:
        connection.send(traceback.format_exc())


def _row(reader: TimedReader, index: int, decoder: Decoder, crash: str | None) -> list[Any]:
    facts, manifest = dict.fromkeys(COLUMNS, ""), reader.manifest
    facts["path"] = name_of(manifest, index)
    if manifest.labels is not None:
        facts["label"] = manifest.classes[manifest.labels[index]]
    try:
        data = reader.read(index)
    except FileNotFoundError:
        facts["note"] = f"{BAD}missing"
    except OSError as error:
        facts["note"] = f"{BAD}cannot be read ({reason(error)})"
    else:
        facts |= {"bytes": len(data), "digest": hashlib.blake2b(data, digest_size=8).hexdigest()}
        defect = crash or find_defect(data, facts, decoder)
        if defect:
            facts["note"] = BAD + defect
    return list(facts.values())
