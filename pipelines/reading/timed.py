"""Reads single images of a manifest with a timeout, for commands that visit every image once."""

import errno
import os
from contextlib import suppress
from queue import Empty, SimpleQueue

from .. import clock
from ..errors import DataError
from ..files.headers import require_regular
from ..manifest import Manifest
from ..storage import Files
from .threads import Threads

LOST = 8  # images in a row that do not answer before the storage counts as lost


class TimedReader:
    """Reads encoded images for several threads, in other threads, which wait for the files.

    Args:
        manifest: the images.
        timeout: seconds to wait for a file.
        callers: number of threads that call `read`.
    """

    def __init__(self, manifest: Manifest, timeout: float, callers: int = 1) -> None:
        self.manifest, self.timeout = manifest, timeout
        self._threads = Threads(callers)
        self._silent = 0  # images in a row that did not answer

    def read(self, image: int) -> bytes:
        """The encoded image.

        Raises:
            OSError: it cannot be read, is a pipe or a device, or does not answer in time.
            DataError: the images before it did not answer either.
        """
        answer: SimpleQueue[bytes | BaseException] = SimpleQueue()
        self._threads.call(lambda: answer.put(_read(self.manifest, image)))
        began = clock.now()
        while (left := self.timeout - clock.since(began)) > 0:
            with suppress(Empty):
                result = answer.get(timeout=min(left, clock.BEAT))
                break
        else:
            self._threads.add()  # in place of the one that waits
            self._silent += 1
            path = self.manifest.path(image)
            if self._silent >= LOST:
                raise DataError(
                    f"{path}: neither it nor the {LOST - 1} images before it could be read within {self.timeout:g} s; "
                    "check the storage, then repeat the command to continue"
                )
            raise TimeoutError(errno.ETIMEDOUT, f"no answer within {self.timeout:g} s", path)
        self._silent = 0
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """Ends each thread as soon as it has finished its file."""
        self._threads.close()


def _read(manifest: Manifest, image: int) -> bytes | BaseException:
    try:
        if isinstance(manifest.storage, Files):  # opening a named pipe would block
            path = manifest.path_bytes(image)
            require_regular(path, os.stat(path))
        return manifest.read(image)
    except BaseException as error:  # raised again where the image was requested
        return error
