"""Rendezvous of a run's processes; if it takes long, says which ranks are missing."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta

import torch.distributed as dist

from unigrad_fast.pipelines import clock
from unigrad_fast.runtime.errors import UserError

NOTICE_SECONDS = 15.0  # of waiting before a message says what for
STRANGER_SECONDS = 10.0  # for which a port may be open without answering as rank 0's store
LONGEST_PAUSE = 0.1  # seconds between two checks whether all are present
SHOWN = 8  # missing ranks listed by number
# By address, the store through which this process has met the others, and how often. It stays, as another rank may
# come to the next meeting before rank 0 has left this one.
_met: dict[str, tuple[dist.Store, int]] = {}


def meet(rank: int, size: int, address: str, port: int, timeout: timedelta) -> dist.Store:
    """Wait for all ranks; returns the store that they share. Processes that meet again do so in the same order.

    Raises:
        RuntimeError, ValueError: some did not connect in time.
        UserError: another program uses the port.
    """
    begun = clock.now()
    host = f"[{address}]" if ":" in address else address
    # world_size=1, because we count ranks ourselves: torch's own count does not say which are missing.
    url = f"tcp://{host}:{port}?rank={rank}&world_size=1"
    # Rank 0 opens the store itself, so it does not wait for itself, however slow its machine is.
    waiting = told(f"rank {rank} of {size} waits for rank 0 at {host}:{port}") if rank else nullcontext()
    if url not in _met:
        with _resolved(rank, size, address, port), waiting:
            _met[url] = _connected(url, timeout, rank, address, port), 0
    store, meetings = _met[url]
    _met[url] = store, meetings + 1
    # The store still has the addresses of earlier meetings, torchrun's also those of killed processes: without a new
    # prefix, a process would try to reach them and hang.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt-{attempt}-{meetings}", store)
    try:
        _gather(store, rank, size, f"{host}:{port}", begun, timeout)
    except dist.DistNetworkError:
        raise RuntimeError("rank 0 has exited; its own message says why") from None
    return store


def _connected(url: str, timeout: timedelta, rank: int, address: str, port: int) -> dist.Store:
    """The store that rank 0 opens, through a thread, because torch would wait for any program that listens there."""
    store: Future[dist.Store] = Future()

    def connect() -> None:
        try:
            store.set_result(next(dist.rendezvous(url, timeout=timeout))[0])
        except BaseException as error:  # raised again below
            store.set_exception(error)

    threading.Thread(target=connect, name="connecting", daemon=True).start()
    heard = None  # since when somebody listens there
    while not wait([store], clock.BEAT).done:
        if rank == 0 or not _listens(address, port):
            heard = None
        elif heard is None:
            heard = clock.now()
        elif clock.since(heard) > STRANGER_SECONDS:
            raise UserError(
                f"what listens at {address}:{port} is not rank 0; set MASTER_PORT to a free port of rank "
                "0's machine, the same for all ranks"
            )
    try:
        return store.result()
    except dist.DistNetworkError as error:
        if rank == 0 and "EADDRINUSE" in str(error):
            raise UserError(
                f"MASTER_PORT = {port}: another program on {socket.gethostname()} uses this port; set it to a free "
                "one, the same for all ranks"
            ) from None
        raise


def _listens(address: str, port: int) -> bool:
    with suppress(OSError, UnicodeError), socket.create_connection((address, port), timeout=1):
        return True
    return False


def _gather(store: dist.Store, rank: int, size: int, place: str, begun: float, timeout: timedelta) -> None:
    store.set(f"here/{rank}", "")
    if store.add("number", 1) == size:
        store.set("all", "")
    noticed, pause = False, 0.005
    while not store.check(["all"]):
        waited = clock.since(begun)
        if waited > timeout.total_seconds():
            store.set("all", f"{_named(_missing(store, size))} did not connect")  # the others read it too
            time.sleep(5 * LONGEST_PAUSE)
            break
        if not noticed and waited > NOTICE_SECONDS:
            missing = _missing(store, size)
            if all(other in missing for other in range(rank)):  # only the lowest rank prints it
                say(f"rank {rank} of {size} waits for {_named(missing)} at {place}")
            noticed = True
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    if failure := store.get("all").decode():
        raise RuntimeError(failure)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Prints a message on stderr if the work inside takes more than NOTICE_SECONDS."""
    timer = threading.Timer(NOTICE_SECONDS, say, (what,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _resolved(rank: int, size: int, address: str, port: int) -> Iterator[None]:
    """Reports immediately if an address cannot be resolved, while torch keeps trying, since it may appear later."""
    done = threading.Event()

    def resolve() -> None:
        try:
            socket.getaddrinfo(address, port)
        except (OSError, UnicodeError) as error:
            if not done.is_set():
                reason = getattr(error, "strerror", None) or error
                say(f"rank {rank} of {size}: MASTER_ADDR {address} cannot be resolved ({reason}); still trying")

    threading.Thread(target=resolve, name="resolving", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _missing(store: dist.Store, size: int) -> list[int]:
    return [rank for rank in range(size) if not store.check([f"here/{rank}"])]


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:SHOWN]))
    return f"ranks {shown}" + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")
