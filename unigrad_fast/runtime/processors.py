"""Threads that compute and the cores they have: too many of them on too few run several times slower than one would."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from unigrad_fast.pipelines.cores import own_cores, quota
from unigrad_fast.runtime.process_group import gather
from unigrad_fast.runtime.wording import count

TOLERATED = 0.5  # cores


@dataclass(frozen=True)
class Use:
    """What one rank has and uses.

    Attributes:
        place: its machine, and the numbers of the cores that it may run on.
        quota: cores' worth of time that its control groups grant, if they limit it.
        threads: with which torch computes.
        own: cores that this process kept busy.
        busy: cores among its own that anybody kept busy; None where the system does not say.
    """

    place: tuple[str, tuple[int, ...]]
    quota: float | None
    threads: int
    own: float
    busy: float | None


class Watch:
    """Sees how busy this process's cores are from when it is made."""

    def __init__(self) -> None:
        self.cores = own_cores()
        self.begun = time.monotonic(), _own_seconds(), _busy_seconds(self.cores)

    def use(self) -> Use:
        begun, own, busy = self.begun
        seconds = max(time.monotonic() - begun, 1e-9)
        now = _busy_seconds(self.cores)
        return Use(
            (socket.gethostname(), tuple(sorted(self.cores))),
            quota(),
            torch.get_num_threads(),
            (_own_seconds() - own) / seconds,
            None if busy is None or now is None else (now - busy) / seconds,
        )

    def crowded(self) -> str | None:
        """What there is to say of rank 0's cores; all ranks call this together."""
        return crowded(gather(self.use()))


def crowded(uses: list[Use]) -> str | None:
    """Whether the threads of ranks that share rank 0's cores wait for each other or for other programs, and what to do.

    Args:
        uses: of all ranks, rank 0's first.
    """
    first = uses[0]
    sharing = [use for use in uses if use.place == first.place]
    ranks, threads = len(sharing), sum(use.threads for use in sharing)
    cores = min(len(first.place[1]), first.quota or float("inf"))
    computing = count(threads, "thread") + (f" of {ranks} ranks" if ranks > 1 else "")
    found = f"the time of {cores:g} core{'' if cores == 1 else 's'}"
    if threads > max(cores, 1) + TOLERATED:
        remedy = f"set OMP_NUM_THREADS={max(1, int(cores) // ranks)}" if ranks <= cores else "start fewer ranks"
        return f"{computing} share {found}, so this run may be many times slower; {remedy}"
    if first.busy is None or first.threads == 1:
        return None
    others = first.busy - sum(use.own for use in sharing)
    fitting = max(1, int(cores - others + TOLERATED) // ranks)
    if others <= TOLERATED or fitting >= first.threads:
        return None
    return (
        f"other programs use about {others:.1f} of {cores:g} core{'' if cores == 1 else 's'}; with {computing} this "
        f"run may be many times slower; set OMP_NUM_THREADS={fitting} or stop those programs"
    )


def _own_seconds() -> float:
    return sum(os.times()[:4])


def _busy_seconds(cores: set[int]) -> float | None:
    """Seconds that some cores were at work for anybody, or taken away by the machine's host."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        total = 0
        for line in lines:
            name, *ticks = line.split()
            if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cores:
                user, nice, system, _idle, _waiting, interrupt, soft, stolen = map(int, ticks[:8])
                total += user + nice + system + interrupt + soft + stolen
        return total / os.sysconf("SC_CLK_TCK") if total else None
    except (OSError, ValueError):
        return None
