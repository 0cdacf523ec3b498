"""Reports the machine: processor, memory, disk, GPUs and their driver, and low limits."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import sys
from collections import Counter
from pathlib import Path

from unigrad_fast.doctor import Finding
from unigrad_fast.pipelines.cores import own_cores, quota, usable_cores
from unigrad_fast.runtime import nvidia
from unigrad_fast.runtime.wording import count

GIB = 2**30
BF16_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "bf16": "Arm BF16"}


def gib(size: int | str, unit: int = 1) -> str:
    return f"{int(size) * unit / GIB:.3g} GiB"


def findings() -> list[Finding]:
    """A row for each device of the machine, and for each low limit."""
    cores, total, granted = usable_cores(), os.cpu_count() or 1, quota()
    allowed = count(cores, "core")
    if granted is not None and granted < len(own_cores()):
        allowed += f" of {total}: a control group limits it to the time of {granted:g}"
    elif cores < total:
        allowed += f" of {total}: the affinity of this process excludes the others"
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    words, named = text.split(), re.search(r"model name\s*: (.+)", text)
    units = ", ".join(name for flag, name in BF16_UNITS.items() if flag in words) or "none"
    memory = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8")))
    return [
        Finding("CPU", f"{named[1] if named else platform.machine()}, {allowed}; bf16 units: {units}"),
        Finding("memory", f"{gib(memory['MemTotal'], 1024)}, {gib(memory['MemAvailable'], 1024)} available"),
        _disk(),
        *gpus(),
        *_limits(cores),
    ]


def _disk() -> Finding:
    free = shutil.disk_usage(".").free
    found = f"{gib(free)} free in {Path.cwd()}"
    if not os.access(".", os.W_OK):
        return Finding("disk", f"{found}, which is not writable", "note", "give pretrain a folder with --output")
    if free < GIB:
        return Finding("disk", found, "note", "free some, or give pretrain another folder with --output")
    return Finding("disk", found)


def gpus() -> list[Finding]:
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    found = nvidia.find()
    if found.usable:
        kinds = Counter(
            f"{gpu.name}, {gib(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}"
            for gpu in map(torch.cuda.get_device_properties, range(found.usable))
        )
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        return [
            *(Finding("GPU", f"{number} x {gpu}") for gpu, number in kinds.items()),
            Finding("driver, NCCL", f"driver {found.driver or 'of unknown version'}, NCCL {nccl}"),
        ]
    if found.hidden:
        return [Finding("GPU", "hidden by CUDA_VISIBLE_DEVICES", "note", "unset CUDA_VISIBLE_DEVICES")]
    return [Finding("GPU", found.problem, "wrong", found.remedy) if found.problem else Finding("GPU", "none")]


def _limits(cores: int) -> list[Finding]:
    """Rows for busy cores and low limits of the system."""
    found = []
    if (load := os.getloadavg()[0]) > cores:
        remedy = "other programs are using the cores, which can make a run many times slower; stop them, or wait"
        found.append(Finding("load", f"{load:.1f} busy processes on {count(cores, 'core')}", "note", remedy))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < 1024:
        found.append(Finding("open files", f"at most {files} per process", "note", "ulimit -n 4096"))
    if os.path.isdir("/dev/shm") and (size := shutil.disk_usage("/dev/shm").total) < GIB:
        remedy = "start the container with --shm-size 1g: NCCL uses it between ranks on one machine"
        found.append(Finding("/dev/shm", gib(size), "note", remedy))
    return found
