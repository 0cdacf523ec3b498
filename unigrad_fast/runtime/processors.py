"""Warns of too many compute threads for the available cores, which can be several times slower than one thread."""

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
    """Cores that one rank has and uses.

    Attributes:
        place: its machine, and the numbers of the cores that it may run on.
        quota: CPU time that its control groups allow, in cores; None if unlimited.
        threads: torch's compute threads.
        own: mean number of cores that this process kept busy.
        busy: mean number of its cores that were busy with any process; None if the system does not say.
    """

    place: tuple[str, tuple[int, ...]]
    quota: float | None
    threads: int
    own: float
    busy: float | None


class Watch:
    """Measures how busy this process's cores are, from its creation on."""

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
        """A warning if rank 0's cores are overloaded; all ranks call this together."""
        return crowded(gather(self.use()))


def crowded(uses: list[Use]) -> str | None:
    """A warning with a remedy if ranks on rank 0's cores have too few cores, also because of other programs; else None.

    Args:
        uses: one per rank, rank 0's first.
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
    """Seconds that some cores were busy with any process, or taken away by the hypervisor."""
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
