"""Rendezvous of a run's processes; if it takes long, says which ranks are missing."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch.distributed as dist

NOTICE_SECONDS = 15.0  # of waiting before a message says what for
LONGEST_PAUSE = 0.1  # seconds between two checks whether all are present
SHOWN = 8  # missing ranks listed by number


def meet(rank: int, size: int, address: str, port: int, timeout: timedelta) -> dist.Store:
    """Wait for all ranks; returns the store that they share.

    Raises:
        RuntimeError, ValueError: some did not connect in time.
    """
    begun = time.monotonic()
    host = f"[{address}]" if ":" in address else address
    # world_size=1, because we count ranks ourselves: torch's own count does not say which are missing.
    url = f"tcp://{host}:{port}?rank={rank}&world_size=1"
    # Rank 0 opens the store itself, so it does not wait for itself, however slow its machine is.
    waiting = told(f"rank {rank} of {size} waits for rank 0 at {host}:{port}") if rank else nullcontext()
    with _resolved(rank, size, address, port), waiting:
        store, _, _ = next(dist.rendezvous(url, timeout=timeout))
    # torchrun's store outlives the processes and still has the addresses of killed ones: without a new prefix, a
    # restarted process would try to reach them and hang.
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    try:
        _gather(store, rank, size, f"{host}:{port}", begun, timeout)
    except dist.DistNetworkError:
        raise RuntimeError("rank 0 has exited; its own message says why") from None
    return store


def _gather(store: dist.Store, rank: int, size: int, place: str, begun: float, timeout: timedelta) -> None:
    store.set(f"here/{rank}", "")
    if store.add("number", 1) == size:
        store.set("all", "")
    noticed, pause = False, 0.005
    while not store.check(["all"]):
        waited = time.monotonic() - begun
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
