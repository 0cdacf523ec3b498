"""Processes of a run: which launcher started this one, and the process group that connects them.

`torchrun` and `deepspeed` identify a process by environment variables; SLURM's `srun` does so with its own variables;
without a launcher a run is one process, which needs no network.

If a rank dies, its launcher notices and ends the others (torchrun, `srun --kill-on-bad-exit=1`); on gloo the others
notice too, because their next collective fails when the connection breaks (after 0.1 s on one machine). During
training `attendance` finds out which rank it was, and ends the others if it hangs.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from unigrad_fast.runtime import devices, torch_private
from unigrad_fast.runtime.errors import DataError, Preempted, RunStopped, UserError
from unigrad_fast.runtime.limits import require_limits
from unigrad_fast.runtime.rendezvous import meet, told

Result = TypeVar("Result")

COLLECTIVE_TIMEOUT = timedelta(minutes=60)  # ranks may have to wait for one that lists millions of files
RENDEZVOUS_TIMEOUT = timedelta(minutes=10)  # for which a process waits for the others
UNLIMITED = timedelta(days=30)  # where `attendance` judges instead, which leaves out time in which nothing ran
LIBRARIES = ("GLOO_", "NCCL_", "TORCH_GLOO_", "TORCH_NCCL_")  # begin the names of variables that these read
WAYS = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, if set, must name the right network device"


@dataclass(frozen=True)
class Launch:
    """This process as described by its launcher.

    Attributes:
        launcher: "single", "torchrun", "deepspeed", "slurm", or "environment" for any other that sets RANK.
        rank, size: index of this process and number of processes in the run.
        local_rank, local_size: the same among the processes on its machine.
        address, port: where rank 0 can be reached; None for a single process.
    """

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class World:
    """This process in the run, once the process group exists.

    Attributes:
        rank, size: index of this process and number of processes in the run.
        local_rank, local_size: the same among the processes on its machine.
        device: the device of this process.
        backend: backend of collectives on the device's tensors, "gloo" or "nccl". CPU tensors always use gloo.
        hosts: the machine of each rank, by name.
        store: the key-value store shared by all ranks.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str
    hosts: tuple[str, ...] = ()
    store: dist.Store | None = None


def launch_environment(environ: Mapping[str, str]) -> Launch:
    """Identify this process from its environment variables.

    Raises:
        UserError: the environment is incomplete or contradictory; the message names the variable.
    """
    # A WORLD_SIZE of 1 alone, as of a container's image, says nothing.
    if environ.get("RANK") or environ.get("WORLD_SIZE", "").strip() not in ("", "1"):
        return _from_launcher(environ)
    # Only srun's tasks have a step ID; in the batch script itself SLURM_NTASKS is what was reserved.
    if environ.get("SLURM_STEP_ID") and "SLURM_PROCID" in environ:
        size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        if size in environ and _integer(environ, size) > 1:
            return _from_slurm(environ, size)
    return Launch("single")


def _from_launcher(environ: Mapping[str, str]) -> Launch:
    size = _integer(environ, "WORLD_SIZE")
    rank = _integer(environ, "RANK", below=("WORLD_SIZE", size))
    name, local = ("torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment"), "LOCAL_WORLD_SIZE"
    if "LOCAL_SIZE" in environ and "LOCAL_WORLD_SIZE" not in environ:
        name, local = "deepspeed", "LOCAL_SIZE"
    if size == 1:
        return Launch(name)
    local_size = _integer(environ, local)
    if local_size > size:
        raise UserError(f"{local} is {local_size}, more than WORLD_SIZE, which counts all machines and is {size}")
    return Launch(
        name,
        rank=rank,
        size=size,
        local_rank=_integer(environ, "LOCAL_RANK", below=(local, local_size)),
        local_size=local_size,
        address=_text(environ, "MASTER_ADDR"),
        port=_port(environ),
    )


def _from_slurm(environ: Mapping[str, str], size_name: str) -> Launch:
    size = _integer(environ, size_name)
    local = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in environ else "SLURM_NTASKS_PER_NODE"
    counts = _tasks_per_node(local, _text(environ, local))
    node = _integer(environ, "SLURM_NODEID", below=(local, len(counts))) if len(set(counts)) > 1 else 0
    if counts[node] > size:
        raise UserError(f"{local} is {environ[local]}, more than {size_name}, which counts all machines and is {size}")
    hosts = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
    return Launch(
        "slurm",
        rank=_integer(environ, "SLURM_PROCID", below=(size_name, size)),
        size=size,
        local_rank=_integer(environ, "SLURM_LOCALID", below=(local, counts[node])),
        local_size=counts[node],
        address=environ.get("MASTER_ADDR") or _first_host(hosts, _text(environ, hosts)),
        port=_port(environ) if "MASTER_PORT" in environ else _slurm_port(environ),
    )


def _first_host(name: str, nodelist: str) -> str:
    try:
        return expand_hosts(nodelist)[0]
    except ValueError as error:
        raise UserError(f"{name}: {error}; set MASTER_ADDR to the name of rank 0's machine") from None


def _slurm_port(environ: Mapping[str, str]) -> int:
    """A port below the system's range of ephemeral ports, different for each job and step."""
    step = environ["SLURM_STEP_ID"]
    return 12000 + (97 * _integer(environ, "SLURM_JOB_ID") + (int(step) if step.isdecimal() else 0)) % 20000


def _tasks_per_node(name: str, text: str) -> list[int]:
    """SLURM's "2(x3),1" as [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UserError(f"{name} is {text!r}, expected something like '4' or '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_hosts(nodelist: str) -> list[str]:
    """Expands SLURM's list of hosts: "gpu[01-03,07],login" becomes gpu01, gpu02, gpu03, gpu07, login.

    Raises:
        ValueError: it is empty or malformed.
    """
    hosts: list[str] = []
    for word in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodelist):
        parts = re.split(r"\[([^\[\]]*)\]", word.strip())  # alternately text and content of brackets
        choices = [_ranges(part) if i % 2 else [part] for i, part in enumerate(parts)]
        hosts += ["".join(choice) for choice in itertools.product(*choices)]
    if not all(hosts) or not hosts or re.search(r"[\[\]]", re.sub(r"\[[^\[\]]*\]", "", nodelist)):
        raise ValueError(f"{nodelist!r} is not a list of hosts")
    return hosts


def _ranges(text: str) -> list[str]:
    """ "01-03,07" as ["01", "02", "03", "07"]."""
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ValueError(f"[{text}] is not a list of numbers")
        first, last = match[1], match[2] or match[1]
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise UserError(
            f"{name} is not set, but other variables say that this is one of several processes; start "
            "the run with torchrun, deepspeed or srun, or unset RANK and WORLD_SIZE for a single process"
        )
    return environ[name]


def _integer(environ: Mapping[str, str], name: str, below: tuple[str, int] | None = None) -> int:
    text = _text(environ, name)
    if not text.isdecimal():
        raise UserError(f"{name} is {text!r}, expected an integer")
    if below is not None and int(text) >= below[1]:
        raise UserError(f"{name} is {text}, but {below[0]} allows only 0 to {below[1] - 1}")
    return int(text)


def _port(environ: Mapping[str, str]) -> int:
    port = _integer(environ, "MASTER_PORT")
    if not 0 < port < 65536:
        raise UserError(f"MASTER_PORT is {port}, expected 1 to 65535")
    return port


_changed: dict[str, str | None] = {}  # environment variables that `start` has set, with their previous values


def start(device: str, timeout: timedelta = COLLECTIVE_TIMEOUT) -> World:
    """Join the run's processes: initialise torch.distributed and choose this process's device.

    Args:
        device: "cpu", "cuda", or "auto" for CUDA if there is a GPU.
        timeout: how long a collective may take.

    Raises:
        UserError: the environment is wrong, some processes did not connect, or not all have the device: no GPU, one
            that torch cannot use, or GPUs on some machines only.
    """
    launch = launch_environment(os.environ)
    require_limits(launch.size)
    mine = devices.choose(device, launch.local_rank, launch.local_size, own_card=launch.launcher == "slurm")
    if launch.size > 1 and not mine.problem:
        mine = replace(mine, problem=_no_interface(os.environ.get("GLOO_SOCKET_IFNAME", "")))
    chosen = mine.device
    # DeepSpeed takes LOCAL_RANK for the index of the device.
    _set("LOCAL_RANK", str(launch.local_rank if chosen.index is None else chosen.index))
    _set("LOCAL_WORLD_SIZE", str(launch.local_size))  # the loader divides the cores by it
    if chosen.type == "cpu":
        _set("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed takes a GPU if there is one
    elif os.environ.get("DS_ACCELERATOR"):
        _set("DS_ACCELERATOR", chosen.type)
    if launch.local_size == launch.size and any(name == "lo" for _, name in socket.if_nameindex()):
        # On one machine the loopback device suffices, while the host's name may not resolve, for example offline.
        _set("GLOO_SOCKET_IFNAME", (launch.size > 1 and os.environ.get("GLOO_SOCKET_IFNAME")) or "lo")
        if launch.size == 1:  # it talks to nobody, whatever a cluster's profile says
            _set("NCCL_SOCKET_IFNAME", "lo")
    try:
        place = launch.rank, launch.size, launch.address, launch.port
        try:
            store = dist.HashStore() if launch.size == 1 else meet(*place, RENDEZVOUS_TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"rank {launch.rank} of {launch.size} could not connect to the others at {launch.address}:"
                f"{launch.port} within {RENDEZVOUS_TIMEOUT.total_seconds():g} s: {_first_line(error)}\n"
                f"Check that all {launch.size} processes were started, and that MASTER_ADDR and MASTER_PORT name a "
                f"free port of rank 0's machine that the others can reach; {WAYS}"
            ) from error
        hosts = tuple(each.host for each in devices.agree(store, launch.rank, launch.size, mine))
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        with told(
            f"rank {launch.rank} of {launch.size}: all processes have started, but some cannot reach each other; {WAYS}"
        ):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo",
                store=store,
                rank=launch.rank,
                world_size=launch.size,
                timeout=timeout,
                device_id=chosen if chosen.type == "cuda" else None,
            )
    except (RuntimeError, UserError, ValueError) as error:
        _restore()
        theirs = sorted(name for name in os.environ if name.startswith(LIBRARIES))
        if isinstance(error, UserError) or (launch.size == 1 and not theirs):
            raise
        remedy = f"change or unset {', '.join(theirs)}" if theirs else WAYS
        raise UserError(
            f"rank {launch.rank} of {launch.size}: torch cannot connect the processes: {_first_line(error)}; {remedy}"
        ) from error
    return World(
        rank=launch.rank,
        size=launch.size,
        local_rank=launch.local_rank,
        local_size=launch.local_size,
        device=chosen,
        backend="nccl" if chosen.type == "cuda" else "gloo",
        hosts=hosts,
        store=store,
    )


def _no_interface(names: str) -> str:
    """What is wrong with the network devices that gloo is to use; empty if nothing."""
    there = [name for _, name in socket.if_nameindex()]
    if {name.strip().partition(":")[0] for name in names.split(",")} <= {*there, ""}:
        return ""
    return (
        f"GLOO_SOCKET_IFNAME = {names}: no such network device, available: {', '.join(there)}; unset it, or name the "
        "one that reaches the other processes"
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def stop() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        # Once imported, DeepSpeed keeps its own groups, which a later engine in this process would use.
        deepspeed = sys.modules.get("deepspeed.comm")
        if deepspeed is not None and deepspeed.is_initialized():
            deepspeed.destroy_process_group()
        else:
            dist.destroy_process_group()
    _restore()


_ONE = threading.Lock()  # torch has one default group per process


@contextmanager
def session(device: str = "auto", timeout: timedelta = COLLECTIVE_TIMEOUT) -> Iterator[World]:
    """`start`, and `stop` at the end.

    After an error on GPUs the process group is not stopped: the other ranks may be waiting in a collective that this
    one will never start, and an orderly stop would wait for them.
    """
    if not _ONE.acquire(blocking=False):
        raise UserError(
            "another call in this process trains or evaluates already, in another thread or around this one; make one "
            "after the other, or use a process for each"
        )
    try:
        world = start(device, timeout)
        try:
            yield world
        except BaseException:
            if world.device.type != "cuda":
                stop()
            raise
        stop()
    finally:
        _ONE.release()


def limit(timeout: timedelta) -> None:
    """Set the timeout of collectives in every existing group, including those of libraries."""
    torch_private.set_timeout(timeout)


def on_all_ranks(work: Callable[[], Result]) -> Result:
    """Run `work` on every rank; if it fails on some, all ranks raise the error of the first of them.

    Without a process group it is a plain call. Only errors that a user can cause are shared: wrong input, a full disk.
    """
    failure: Exception | None = None
    try:
        result = work()
    except (DataError, OSError, Preempted, RunStopped, UserError) as error:
        failure = error
    errors = [each for each in gather(failure) if each is not None]
    try:
        if errors:
            raise errors[0]
    finally:
        del failure, errors  # the errors' frames would keep them, and themselves, with all their files
    return result


def on_first(work: Callable[[], Result]) -> Result:
    """Run `work` on rank 0 only; all ranks wait for it and return its picklable value or raise its error."""
    if not dist.is_initialized():
        return work()
    values = [on_all_ranks(lambda: work() if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def gather(value: Result) -> list[Result]:
    """The picklable values of all ranks, on every rank; [value] without a process group."""
    if not dist.is_initialized():
        return [value]
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _set(name: str, value: str) -> None:
    _changed.setdefault(name, os.environ.get(name))
    os.environ[name] = value


def _restore() -> None:
    for name, value in _changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _changed.clear()
