"""Chooses the device of each rank. Ranks compare their choices before they join, because a mixture hangs or is slow."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist

from unigrad_fast.runtime import nvidia
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.wording import count

FAREWELL_SECONDS = 10.0  # for which rank 0, which hosts the store, waits for the others to read the error
ON_CPU = "or compute on the CPU with engine.device cpu"


@dataclass(frozen=True)
class Choice:
    """The device of one rank.

    Attributes:
        host: name of its machine.
        kind: "cuda" or "cpu".
        index: index of its GPU.
        reason: why it is not a GPU.
        problem: why the rank cannot take part, with the remedy.
    """

    host: str
    kind: str
    index: int | None = None
    reason: str = ""
    problem: str = ""

    @property
    def device(self) -> torch.device:
        return torch.device(self.kind) if self.index is None else torch.device(self.kind, self.index)


def choose(device: str, local_rank: int, local_size: int, own_card: bool) -> Choice:
    """Choose this rank's device.

    Args:
        device: "auto", "cuda" or "cpu".
        local_rank, local_size: index and number of this process among those on its machine.
        own_card: the launcher may make only one card visible to each process.
    """
    on_cpu = Choice(socket.gethostname(), "cpu")
    if device == "cpu":
        return replace(on_cpu, reason="engine.device is cpu there")
    found = nvidia.find()
    if not found.usable:
        reason = "CUDA_VISIBLE_DEVICES hides the GPUs" if found.hidden else found.problem or "torch sees no GPU"
        if found.problem:
            return replace(on_cpu, problem=f"engine.device = {device}: {reason}; {found.remedy}; {ON_CPU}")
        if device == "cuda":
            remedy = "unset it" if found.hidden else "install a torch for your driver"
            return replace(on_cpu, problem=f"engine.device = cuda: {reason}; {remedy}, {ON_CPU}")
        return replace(on_cpu, reason=reason)
    index = 0 if found.usable == 1 and own_card else local_rank
    if index >= found.usable:
        problem = (
            f"{local_size} processes on this machine, but torch sees {count(found.usable, 'GPU')}; "
            f"start {count(found.usable, 'process')} per machine"
        )
        return replace(on_cpu, problem=problem)
    return Choice(on_cpu.host, "cuda", index)


def agree(store: dist.Store, rank: int, size: int, mine: Choice) -> list[Choice]:
    """Exchange the devices of all ranks through the shared store.

    Raises:
        UserError: on all ranks, if one cannot take part, or if some would use GPUs and others the CPU.
    """
    store.set(f"devices/{rank}", json.dumps(asdict(mine)))
    everyone = [Choice(**json.loads(store.get(f"devices/{other}"))) for other in range(size)]
    if refusal := _refusal(everyone):
        store.add("devices/read", 1)
        until = time.monotonic() + FAREWELL_SECONDS
        while rank == 0 and store.add("devices/read", 0) < size and time.monotonic() < until:
            time.sleep(0.02)
        raise UserError(refusal)
    return everyone


def _refusal(everyone: Sequence[Choice]) -> str | None:
    """Why these ranks cannot work together; None if they can."""
    several = len(everyone) > 1
    problems = _by_hosts(everyone, lambda choice: choice.problem)
    if problems:
        return "\n".join(f"{hosts}: {problem}" if several else problem for problem, hosts in problems.items())
    if len({choice.kind for choice in everyone}) < 2:
        return None
    on_gpus = ", ".join(dict.fromkeys(choice.host for choice in everyone if choice.kind == "cuda"))
    others = _by_hosts(everyone, lambda choice: choice.reason)
    on_cpus = "; ".join(f"{hosts} on the CPU: {reason}" for reason, hosts in others.items())
    return f"{on_gpus} would compute on GPUs, {on_cpus}; use machines of one kind, {ON_CPU}"


def _by_hosts(everyone: Sequence[Choice], said: Callable[[Choice], str]) -> dict[str, str]:
    """The distinct texts, each with the machines that it applies to."""
    hosts: dict[str, dict[str, None]] = {}
    for choice in everyone:
        if text := said(choice):
            hosts.setdefault(text, {})[choice.host] = None
    return {text: ", ".join(names) for text, names in hosts.items()}
