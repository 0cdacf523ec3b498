"""Worker processes joined by gloo, for tests of what happens between ranks."""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic

from forked import start

GRACE = 2.0  # seconds that the other ranks have to answer once one has failed


class WorkerError(AssertionError):
    """A function failed in a worker; the message holds the worker's traceback."""


def _serve(rank: int, size: int, store_file: str, requests: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)  # for DeepSpeed
    store = dist.FileStore(store_file, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        while True:
            message = requests.recv_bytes()
            try:
                function, args = pickle.loads(message)
                answer = pickle.dumps((True, function(*args)))
            except BaseException:
                answer = pickle.dumps((False, traceback.format_exc()))
            requests.send_bytes(answer)
    except EOFError:  # the test process is gone
        pass
    finally:
        dist.destroy_process_group()


class WorkerGroup:
    """`size` processes that call a function together, one rank each, started at the first call and reused.

    Functions are module-level ones of an importable module, and see nothing of the test's own process but their
    arguments and its environment variables. Tensors travel by value. Where only some ranks fail, the next call
    starts new processes, since the others may still wait in a collective.

    Args:
        size: number of ranks.
        timeout: seconds after which a call is given up and its processes are killed.
    """

    def __init__(self, size: int, timeout: float = 120.0):
        self.size = size
        self.timeout = timeout
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory | None = None

    def run(self, function: Callable, *args) -> list:
        """Call `function(*args)` on every rank, where torch.distributed is initialised.

        Returns:
            The ranks' results, by rank.

        Raises:
            WorkerError: it raised on a rank, a worker died, or it took too long.
        """
        if not self._processes:
            self._start()
        message = pickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        answers = {}
        try:
            answers = self._collect()
        finally:
            if len(answers) < self.size or not all(process.is_alive() for process in self._processes):
                self.close()
        for rank, (good, result) in answers.items():
            if not good:
                raise WorkerError(f"on rank {rank} of {self.size}:\n{result}")
        return [answers[rank][1] for rank in range(self.size)]

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="workers-")
        store = os.path.join(self._folder.name, "store")
        for rank in range(self.size):
            pipe, theirs = Pipe()
            process = start(_serve, rank, self.size, store, theirs)
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def _collect(self) -> dict[int, tuple[bool, object]]:
        """Answers by rank, in the order in which they came; all of them unless something failed."""
        answers: dict[int, tuple[bool, object]] = {}
        end = monotonic() + self.timeout
        while len(answers) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, end - monotonic()))
            if not ready:
                if all(good for good, _ in answers.values()):
                    late = min(waiting.values())
                    answers[late] = (False, f"no answer within {self.timeout:g} s")
                break
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self._processes[rank].join(10)
                    answers[rank] = (False, f"the process died, exit {self._processes[rank].exitcode}")
                if not answers[rank][0]:
                    end = min(end, monotonic() + GRACE)
        return answers

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
