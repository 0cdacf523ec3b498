"""How the processes of a run find each other, and who is said to be awaited where that takes long."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

NOTICE_SECONDS = 15.0  # of waiting, after which it is said what for
LONGEST_PAUSE = 0.1  # seconds between two looks whether all are there
SHOWN = 8  # missing ranks, by number


def meet(rank: int, size: int, address: str, port: int, timeout: timedelta) -> dist.Store:
    """A store that all ranks share, once all of them are there.

    Raises:
        RuntimeError, ValueError: not all of them came in time.
    """
    begun = time.monotonic()
    host = f"[{address}]" if ":" in address else address
    # Each process counts itself alone here: torch's own count does not say who is missing.
    url = f"tcp://{host}:{port}?rank={rank}&world_size=1"
    with _resolved(rank, size, address, port), told(f"rank {rank} of {size} waits for rank 0 at {host}:{port}"):
        store, _, _ = next(dist.rendezvous(url, timeout=timeout))
    # torchrun's store outlives the processes, and with it the addresses of those that were killed: a process that it
    # starts again would try to reach the dead, and wait.
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    try:
        _gather(store, rank, size, f"{host}:{port}", begun, timeout)
    except dist.DistNetworkError:
        raise RuntimeError("rank 0 has left again, and says why") from None
    return store


def _gather(store: dist.Store, rank: int, size: int, place: str, begun: float, timeout: timedelta) -> None:
    store.set(_key(rank), "")
    if store.add("number", 1) == size:
        store.set("all", "")
    noticed, pause = False, 0.005
    while not store.check(["all"]):
        waited = time.monotonic() - begun
        if waited > timeout.total_seconds():
            store.set("all", f"{_named(_missing(store, size))} did not come")  # which the others read too
            time.sleep(5 * LONGEST_PAUSE)
            break
        if not noticed and waited > NOTICE_SECONDS:
            missing = _missing(store, size)
            if all(other in missing for other in range(rank)):  # one rank speaks for all
                say(f"rank {rank} of {size} waits for {_named(missing)} at {place}")
            noticed = True
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    if failure := store.get("all").decode():
        raise RuntimeError(failure)


@contextmanager
def told(what: str | Callable[[], str]) -> Iterator[None]:
    """Says what is waited for, on stderr, where that takes more than NOTICE_SECONDS."""
    timer = threading.Timer(NOTICE_SECONDS, lambda: say(what if isinstance(what, str) else what()))
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
    """Says at once where an address has no meaning here, which torch keeps trying; it may get one."""
    done = threading.Event()

    def resolve() -> None:
        try:
            socket.getaddrinfo(address, port)
        except (OSError, UnicodeError) as error:
            if not done.is_set():
                reason = getattr(error, "strerror", None) or error
                say(f"rank {rank} of {size}: MASTER_ADDR is {address}, which cannot be resolved ({reason}); trying on")

    threading.Thread(target=resolve, name="resolving", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _key(rank: int) -> str:
    return f"here/{rank}"


def _missing(store: dist.Store, size: int) -> list[int]:
    return [rank for rank in range(size) if not store.check([_key(rank)])]


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:SHOWN]))
    return f"ranks {shown}" + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")
