"""Work of a generator in a thread of its own."""

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
Work = Callable[[Callable[[], bool]], Generator[Item, None, None]]  # is told whether it is to stop


def in_background(work: Work, ahead: int) -> Generator[Item, None, None]:
    """What a generator gives, made by a thread up to `ahead` items before they are asked for.

    An exception there is raised here. Closing this generator ends the thread, and waits for it; work that takes long
    asks the function it is given whether this has happened.
    """
    worker = _Worker(work, ahead)
    try:
        while (item := worker.next()) is not _END:
            yield item
    finally:
        worker.stop()


_END = object()


class _Worker:
    def __init__(self, work: Work, ahead: int) -> None:
        self._items: queue.Queue = queue.Queue(ahead)
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="views", daemon=True)
        _stop_all_at_exit()
        _running.add(self)
        self._thread.start()

    def next(self) -> object:
        item = self._items.get()
        if item is _END and self._failure is not None:
            raise self._failure
        return item

    def stop(self) -> None:
        self._stopped.set()
        if threading.current_thread() is self._thread:  # garbage was collected there; nobody else empties the queue
            while not self._items.empty():
                self._items.get()
            return
        while self._thread.is_alive():
            try:  # the thread may be waiting to put an item
                self._items.get(timeout=0.01)
            except queue.Empty:
                self._thread.join(0.01)

    def _run(self, work: Work) -> None:
        try:
            with closing(work(self._stopped.is_set)) as items:
                for item in items:
                    if not self._stopped.is_set():
                        self._items.put(item)
                    if self._stopped.is_set():
                        return
        except BaseException as error:
            self._failure = error
        finally:
            self._items.put(_END)


@cache
def _stop_all_at_exit() -> None:
    """A thread that is inside a library when the interpreter is taken down would crash it."""
    import nvidia.dali.pipeline  # noqa: F401  # what it does at exit comes after what is registered later

    atexit.register(lambda: [worker.stop() for worker in list(_running)])
