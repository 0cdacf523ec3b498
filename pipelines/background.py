"""Runs a generator in a background thread."""

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import closing
from functools import cache
from typing import TypeVar

Item = TypeVar("Item")
_running: "weakref.WeakSet[_Worker]" = weakref.WeakSet()
Work = Callable[[Callable[[], bool]], Generator[Item, None, None]]  # takes a function that says whether to stop


def in_background(work: Work, ahead: int) -> Generator[Item, None, None]:
    """The items of a generator, which a thread produces up to `ahead` items in advance.

    An exception in the thread is raised here. Closing this generator stops the thread and waits for it; long-running
    work should poll the function it is given, which says whether to stop.
    """
    worker = _Worker(work, ahead)
    try:
        while (item := worker.items.get()) is not _END:
            yield item
        if worker.failure is not None:
            raise worker.failure
    finally:
        worker.stop()


_END = object()


class _Worker:
    def __init__(self, work: Work, ahead: int) -> None:
        self.items: queue.Queue = queue.Queue(ahead)
        self.failure: BaseException | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work,), name="views", daemon=True)
        _stop_all_at_exit()
        _running.add(self)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if threading.current_thread() is self._thread:  # garbage was collected there; nobody else empties the queue
            while not self.items.empty():
                self.items.get()
            return
        while self._thread.is_alive():
            try:  # the thread may be waiting to put an item
                self.items.get(timeout=0.01)
            except queue.Empty:
                self._thread.join(0.01)

    def _run(self, work: Work) -> None:
        try:
            with closing(work(self._stopped.is_set)) as items:
                for item in items:
                    if not self._stopped.is_set():
                        self.items.put(item)
                    if self._stopped.is_set():
                        return
        except BaseException as error:
            self.failure = error
        finally:
            self.items.put(_END)


@cache
def _stop_all_at_exit() -> None:
    """Stops all threads at exit: one that is still inside a library when the interpreter shuts down would crash it."""
    import nvidia.dali.pipeline  # noqa: F401  # its exit handlers run after those that are registered later

    atexit.register(lambda: [worker.stop() for worker in list(_running)])
