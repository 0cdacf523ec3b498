"""Chooses the number of compute threads from the cores that are free, and says if other programs take or leave them.

Threads that meet after every operator are as slow as the one that waits for a core. Beside one busy program on two
cores, one thread is faster than two (docs/measurements.md). The number decides the order of sums, so a run keeps it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from unigrad_fast.pipelines.cores import own_cores, quota, seconds_of_group
from unigrad_fast.runtime.wording import count

if TYPE_CHECKING:
    import torch

TOLERATED = 0.5  # cores that other programs may use
LEAST_SECONDS, MOST_SECONDS = 1.0, 60.0  # of watching before a number is chosen
LATER_SECONDS = 10.0  # between two looks at the cores during a run
FREE_LOOKS = 6  # in a row at which the cores must be free: other programs pause, too
VARIABLE = "OMP_NUM_THREADS"
CHOSEN_BY = (  # with one of these variables a user or a launcher decides the number of threads, or their cores
    *(VARIABLE, "OMP_THREAD_LIMIT", "OMP_DYNAMIC", "OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY"),
    *("MKL_NUM_THREADS", "MKL_DOMAIN_NUM_THREADS", "MKL_DYNAMIC"),
)


@dataclass(frozen=True)
class Use:
    """Cores that one rank has and uses.

    Attributes:
        place: its machine, and the numbers of the cores that it may run on.
        quota: CPU time that its control groups allow, in cores; None if unlimited.
        threads: torch's compute threads.
        own: mean number of cores that this process kept busy.
        busy: mean number of its cores that were busy with any process; None if the system does not say.
        group: mean number of cores used by all processes that share the quota; None if the system does not say.
    """

    place: tuple[str, tuple[int, ...]]
    quota: float | None
    threads: int
    own: float
    busy: float | None
    group: float | None = None


class Watch:
    """Measures how busy this process's cores are, from its creation on."""

    def __init__(self) -> None:
        self.cores = own_cores()
        self.begun = time.monotonic()
        self.before = self._readings()

    def seconds(self) -> float:
        """How long it has been watching."""
        return time.monotonic() - self.begun

    def use(self) -> Use:
        import torch

        seconds = max(self.seconds(), 1e-9)
        own, busy, group = (
            None if before is None or now is None else (now - before) / seconds
            for before, now in zip(self.before, self._readings(), strict=True)
        )
        place = socket.gethostname(), tuple(sorted(self.cores))
        return Use(place, quota(), torch.get_num_threads(), own or 0.0, busy, group)

    def _readings(self) -> tuple[float | None, ...]:
        return sum(os.times()[:4]), _busy_seconds(self.cores), seconds_of_group()


_watch: Watch | None = None


def begin() -> None:
    """Begins to watch the cores for `compute_threads`: before torch is imported, as that takes the seconds it needs."""
    global _watch
    if _watch is None or _watch.seconds() > MOST_SECONDS:
        _watch = Watch()


@dataclass(frozen=True)
class Capacity:
    """The compute threads that a machine can run beside whatever else it does.

    Attributes:
        threads: number of threads per rank that get a core each; 0 if there are more ranks than free cores.
        why: what decides it.
        crowded: other programs are part of the reason.
    """

    threads: int
    why: str
    crowded: bool


def capacity(rank: Use, uses: list[Use]) -> Capacity:
    """The capacity of a rank's machine, given the uses of all ranks."""
    sharing = [use for use in uses if use.place == rank.place]
    others = 0.0 if rank.busy is None else rank.busy - sum(use.own for use in sharing)
    cores = count(len(rank.place[1]), "core")
    why = f"other programs use about {others:.1f} of {cores}" if others > TOLERATED else f"{cores} can be used"
    found = _capacity(len(rank.place[1]), others, len(sharing), why)
    if rank.quota is None:
        return found
    sharing = [use for use in uses if use.place[0] == rank.place[0]]  # also those that are bound to other cores
    others = 0.0 if rank.group is None else rank.group - sum(use.own for use in sharing)
    why = f"a control group allows the time of {rank.quota:g} core{'' if rank.quota == 1 else 's'}"
    if others > TOLERATED:
        why += f", of which other programs use about {others:.1f}"
    return min(found, _capacity(rank.quota, others, len(sharing), why), key=lambda each: each.threads)


def _capacity(cores: float, others: float, ranks: int, why: str) -> Capacity:
    crowded = others > TOLERATED
    left = max(0, int(cores - others + TOLERATED if crowded else cores))
    return Capacity(left // ranks, f"{why} by {ranks} ranks" if ranks > 1 and not crowded else why, crowded)


def crowded(uses: list[Use], remedy: Callable[[int], str]) -> str | None:
    """A warning with a remedy if ranks on rank 0's cores have too few cores, also because of other programs; else None.

    Args:
        uses: one per rank, rank 0's first.
        remedy: how to compute with a number of threads.
    """
    first = uses[0]
    sharing = [use for use in uses if use.place == first.place]
    ranks, found = len(sharing), capacity(first, uses)
    cores, threads = min(len(first.place[1]), first.quota or float("inf")), sum(use.threads for use in sharing)
    fitting, too_many = max(1, found.threads), ranks > max(1, cores)
    nearly = not found.crowded and threads <= cores + TOLERATED  # 2 threads are not slow in the time of 1.5 cores
    if not too_many and (first.threads <= fitting or nearly):
        return None
    computing = count(threads, "thread") + (f" of {ranks} ranks" if ranks > 1 else "")
    ways = ["stop those programs"] * found.crowded + ["start fewer ranks" if too_many else remedy(fitting)]
    return f"{found.why}; with {computing} this run may be many times slower; {', or '.join(ways)}"


class ComputeThreads:
    """The compute threads of this process, once chosen.

    Attributes:
        said: a line that says how many and why, if the user did not choose them.
        warning: a line that says that they are too many, if they are.

    Args:
        ranks: number of ranks that share this machine's cores; 0 to watch nothing.
        hindered: other programs needed the cores when the number was chosen.
    """

    def __init__(
        self, said: str | None = None, warning: str | None = None, ranks: int = 0, hindered: bool = False
    ) -> None:
        self.said, self.warning = said, warning
        self._ranks = 0 if warning else ranks  # 0 when there is nothing more to watch
        self._hindered_ranks = ranks if hindered else 0  # likewise, for the end of the crowding
        self._was_crowded = False  # when last looked at
        self._free_looks = 0  # in a row
        self._watch, self._free_watch = Watch(), Watch()

    def newly_crowded(self, remedy: Callable[[int], str]) -> str | None:
        """A warning, once, if other programs came to need the cores; may be called often, on any rank.

        They have to be there at two looks, because a process that was suspended finds the cores used meanwhile.
        """
        if not self._ranks or self._watch.seconds() < LATER_SECONDS:
            return None
        found, before = crowded([self._watch.use()] * self._ranks, remedy), self._was_crowded
        self._watch, self._was_crowded = Watch(), bool(found)
        if not (found and before):
            return None
        self._ranks = 0
        return found

    def newly_free(self, remedy: Callable[[int], str]) -> str | None:
        """A line, once, if the cores that other programs needed at the start stay free; may be called often.

        The number stays, as it decides the bits.
        """
        if not self._hindered_ranks or self._free_watch.seconds() < LATER_SECONDS:
            return None
        use, self._free_watch = self._free_watch.use(), Watch()
        found = capacity(use, [use] * self._hindered_ranks)
        is_free = not found.crowded and found.threads > use.threads
        self._free_looks = self._free_looks + 1 if is_free else 0
        if self._free_looks < FREE_LOOKS:
            return None
        self._hindered_ranks = 0
        return (
            f"other programs no longer need the cores: {found.why}, but this run goes on with "
            f"{count(use.threads, 'thread')}, which decide its rounding; to use all, {remedy(found.threads)}"
        )


@contextmanager
def compute_threads(
    device: torch.device, asked: int | None = None, kept: int | None = None, key: str = VARIABLE
) -> Iterator[ComputeThreads]:
    """Inside, torch computes with the number of threads that the user asked for, that the run has, or that fits.

    All ranks call this together and get the same number, unless a variable of `CHOSEN_BY` decides it on a rank.

    Args:
        device: if it is a GPU, other programs are not looked at, and nothing is said.
        asked: `engine.threads`; it precedes the variables, which launchers set too.
        kept: number of threads with which the run was computed so far.
        key: what a user sets to get another number: a configuration key or a variable.
    """
    import torch

    before = torch.get_num_threads()
    try:
        threads = _choose(device.type == "cpu", asked, kept, key)
        yield threads
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def _choose(watched: bool, asked: int | None, kept: int | None, key: str) -> ComputeThreads:
    import torch

    from unigrad_fast.runtime.process_group import gather

    global _watch
    begin()
    watch, _watch = _watch, None
    is_given = bool(asked or any(os.environ.get(name) for name in CHOSEN_BY))
    if watched and not is_given:
        time.sleep(max(0.0, LEAST_SECONDS - watch.seconds()))
    seen = watched and watch.seconds() >= LEAST_SECONDS
    use = watch.use() if seen else replace(watch.use(), own=0.0, busy=None, group=None)
    uses = gather(use)
    found = min((capacity(each, uses) for each in uses), key=lambda each: each.threads)
    fitting = max(1, min(found.threads, *(each.threads for each in uses)))
    number = asked or (use.threads if is_given else kept if kept and watched else fitting)
    if number != use.threads:
        torch.set_num_threads(number)
    if not watched:
        return ComputeThreads()
    said, computing = None, f"computing with {count(number, 'thread')}"
    if kept and number != kept:
        said = f"{computing}; this run began with {kept}, so its numbers change by rounding"
    elif asked or (kept and not is_given):
        said = f"{computing}, as {key} says" if asked else f"{computing}, as this run began"
        if number < fitting:
            said += f"; {found.why}: {_set_to(key, fitting)} may be faster, but rounds differently"
    elif not is_given:
        said = f"{computing}: {found.why}; set {key} to change it"
    each = [replace(each, threads=number) for each in uses]
    ranks = sum(each.place == use.place for each in uses)
    warning = crowded(each, lambda fitting: f"set {_set_to(key, fitting)}")
    # Where ranks have other cores, too, this rank does not see whether those are free.
    return ComputeThreads(said, warning, ranks, found.crowded and not is_given and ranks == len(uses))


def _set_to(key: str, threads: int) -> str:
    return f"{key}={threads}" if key == VARIABLE else f"{key} {threads}"


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
