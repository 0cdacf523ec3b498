"""Reads single images of a manifest with a timeout, for commands that visit every image once."""

import errno
import os
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue

from .. import clock
from ..errors import DataError
from ..files.headers import require_regular
from ..manifest import Manifest

LOST = 8  # images in a row that do not answer before the storage counts as lost


class TimedReader:
    """Reads encoded images for any number of threads; each has a helper thread that waits for the files.

    Args:
        manifest: the images.
        timeout: seconds to wait for a file.
    """

    def __init__(self, manifest: Manifest, timeout: float) -> None:
        self.manifest, self.timeout = manifest, timeout
        self._callers = threading.local()
        self._silent = 0  # images in a row that did not answer

    def read(self, image: int) -> bytes:
        """The encoded image.

        Raises:
            OSError: it cannot be read, is a pipe or a device, or does not answer in time.
            DataError: the images before it did not answer either.
        """
        helper = getattr(self._callers, "helper", None) or _Helper(self.manifest)
        self._callers.helper = helper
        helper.calls.put(image)
        began = clock.now()
        while (left := self.timeout - clock.since(began)) > 0:
            with suppress(Empty):
                result = helper.results.get(timeout=min(left, clock.BEAT))
                break
        else:
            self._callers.helper = None
            helper.end()
            return self._give_up(image)
        self._silent = 0
        if isinstance(result, BaseException):
            raise result
        return result

    def _give_up(self, image: int) -> bytes:
        self._silent += 1
        path = self.manifest.path(image)
        if self._silent >= LOST:
            raise DataError(
                f"{path}: neither it nor the {LOST - 1} images before it could be read within {self.timeout:g} s; "
                "check the storage, then repeat the command to continue"
            )
        raise TimeoutError(errno.ETIMEDOUT, f"no answer within {self.timeout:g} s", path)


class _Helper:
    """A thread that ends with its owner, or once it gets an answer that is no longer needed."""

    def __init__(self, manifest: Manifest) -> None:
        self.calls: SimpleQueue[int | None] = SimpleQueue()
        self.results: SimpleQueue[bytes | BaseException] = SimpleQueue()
        arguments = manifest, self.calls, self.results
        threading.Thread(target=_work, args=arguments, name="image reader", daemon=True).start()

    def end(self) -> None:
        self.calls.put(None)

    def __del__(self) -> None:
        self.end()


def _work(manifest: Manifest, calls: "SimpleQueue[int | None]", results: "SimpleQueue[bytes | BaseException]") -> None:
    while (image := calls.get()) is not None:
        try:
            if manifest.index is None:  # opening a named pipe would block
                path = manifest.path_bytes(image)
                require_regular(path, os.stat(path))
            results.put(manifest.read(image))
        except BaseException as error:  # raised again where the image was requested
            results.put(error)
