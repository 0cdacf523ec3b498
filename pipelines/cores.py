"""The processor cores that this process may use, by its affinity and by the quota of its control groups."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

PROC, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def usable_cores(processes: int = 1) -> int:
    """Cores that threads of this process can keep busy, at least one.

    Args:
        processes: number of processes that share the machine's cores and the quota. The cores of the affinity mask
            count as this process's own, because some launchers pin each process to its cores.
    """
    machine = os.cpu_count() or 1
    return max(1, min(len(own_cores()), int(min(machine, quota() or machine)) // processes))


def own_cores() -> set[int]:
    """The cores that this process may run on, by number."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def quota(proc: Path = PROC, root: Path = ROOT) -> float | None:
    """Cores' worth of CPU time that the control groups of a container or a job allow; None if unlimited."""
    return min(_quotas(proc, root), default=(None,))[0]


def seconds_of_group(proc: Path = PROC, root: Path = ROOT) -> float | None:
    """CPU time so far of all processes that share this process's quota; None if unlimited, or not recorded there."""
    for _, folder in sorted(_quotas(proc, root))[:1]:
        for name, pattern, unit in (("cpu.stat", r"usage_usec (\d+)", 1e6), ("cpuacct.usage", r"(\d+)", 1e9)):
            with suppress(OSError, ValueError):
                if found := re.match(pattern, (folder / name).read_text(encoding="ascii")):
                    return int(found[1]) / unit
    return None


def _quotas(proc: Path, root: Path) -> Iterator[tuple[float, Path]]:
    """The limits of this process's groups in cores, each with the group's folder."""
    try:
        groups = [line.split(":", 2) for line in proc.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return
    for number, controllers, path in (group for group in groups if len(group) == 3):
        if number == "0":
            yield from _along(root, path, _second)
        elif "cpu" in controllers.split(","):
            yield from _along(root / controllers, path, _first)
            yield from _along(root / "cpu", path, _first)


def _along(mount: Path, path: str, read: Callable[[Path], tuple[int, int]]) -> Iterator[tuple[float, Path]]:
    """The limits of a group and of its parents; inside a container the mount may start at any of them."""
    group = mount / path.strip("/")
    for folder in (group, *group.parents):
        if folder.is_relative_to(mount):
            try:
                granted, period = read(folder)
                if granted > 0 and period > 0:
                    yield granted / period, folder
            except (OSError, ValueError):
                continue


def _second(folder: Path) -> tuple[int, int]:
    """Quota and period of cgroups version 2, which writes max where there is no limit."""
    granted, period = (folder / "cpu.max").read_text(encoding="ascii").split()
    return int(granted), int(period)


def _first(folder: Path) -> tuple[int, int]:
    """Quota and period of cgroups version 1, which writes -1 where there is no limit."""
    granted, period = ((folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period"))
    return int(granted), int(period)
