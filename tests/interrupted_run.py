"""Runs that are killed, and the comparison of what they end with."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from command_process import CommandProcess, Inside, start_ranks

from unigrad_fast.checkpoints.files import Reader, latest

DEADLINE = 240.0  # seconds that any wait may take
EVERY_STEP = ("--checkpoint.every", "0.3")  # else after the last
RECIPE = """
recipe: cifar_subset
data: {{batch_size: {batch}, image_size: 16, threads: 1}}
model: {{projector: {{width: 32}}}}
schedule: {{epochs: {epochs}}}
checkpoint: {{every: 99}}
evaluation: {{every: 0}}
telemetry: {{every: 1, effective_rank_every: 1, tensorboard: false}}
engine: {{precision: fp32}}
"""


class Run:
    """The processes of a run with a thin encoder, started as a launcher would.

    Args:
        data: a folder with `recipe.yaml` and the images in `train`.
        inside: as of `CommandProcess`.
    """

    def __init__(self, data: Path, output: Path, ranks: int = 1, *arguments: str, inside: Sequence[Inside] = ()):
        given = ("--recipe", data / "recipe.yaml", "--data.train", data / "train", "--output", output, *arguments)
        self.output = output
        self.processes = start_ranks(ranks, "pretrain", *given, is_thin=True, inside=inside)

    def wait_for(self, happened: Callable[[], bool]) -> bool:
        return wait_for(self.processes, happened)

    def signal(self, number: int, ranks: list[int] | None = None) -> None:
        for rank in range(len(self.processes)) if ranks is None else ranks:
            self.processes[rank].signal(number)

    def end(self) -> tuple[list[int], str]:
        """Exit statuses and what was printed, once all have ended."""
        results = [process.end(DEADLINE) for process in self.processes]
        statuses = [result.returncode for result in results]
        return statuses, "".join(result.stdout + result.stderr for result in results)


def wait_for(processes: Sequence[CommandProcess], happened: Callable[[], bool]) -> bool:
    """Until something is seen (True) or a process has ended (False)."""
    end = time.monotonic() + DEADLINE
    while not happened():
        if any(process.has_ended() for process in processes):
            return False
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.001)
    return True


def steps_logged(output: Path) -> int:
    file = output / "metrics.jsonl"
    return sum('"train"' in line for line in file.read_text().splitlines()) if file.exists() else 0


def losses(output: Path) -> list[tuple]:
    events = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "positive_cosine", "negative_term", "feature_std", "gradient_norm", "effective_rank")
    return [tuple(event[name] for name in names) for event in events if event["event"] == "train"]


def require_equal(one: Path, other: Path, steps: int) -> None:
    """Losses of every step and all tensors of the last checkpoint, bit for bit."""
    assert losses(one) == losses(other)
    assert [step for step, *_ in losses(one)] == list(range(1, steps + 1))
    first, second = Reader(latest(one)), Reader(latest(other))
    assert first.about["step"] == second.about["step"] == steps
    assert first.names == second.names
    assert {name.split(".")[0] for name in first.names} == {"online", "momentum", "target", "objective", "gate"}
    for name in first.names:
        assert torch.equal(first.tensor(name), second.tensor(name)), name


def disturb(
    start: Callable[[], Run],
    output: Path,
    chance: random.Random,
    kills: int,
    one: bool = False,
    longest: float = 0.8,
) -> int:
    """Start a run so often, and kill it each time; how often that was while it saved.

    Args:
        chance: decides the moments: while starting, after a step, some way into a save, ...
        one: a single rank is killed, and the others end by themselves, once a step was seen; before, when they may
            wait for each other to come, they are ended as a launcher does it.
        longest: seconds after a step, at most.
    """
    in_a_save = 0
    for kill in range(kills):
        left = half_saved(output)
        run = start()
        every, began = list(range(len(run.processes))), steps_logged(output)
        wanted = began + chance.randint(0, 1)
        if kill % 2 == 0:  # in a save, some way into it
            while run.wait_for(lambda: steps_logged(output) > wanted and half_saved(output) - left):  # noqa: B023
                time.sleep(chance.uniform(0, 0.03))
                run.signal(signal.SIGSTOP)
                if half_saved(output) - left:
                    break
                run.signal(signal.SIGCONT)
        else:  # anywhere: while starting, or some time after a step
            until = time.monotonic() + chance.uniform(0, 2)
            run.wait_for(lambda: time.monotonic() > until or steps_logged(output) > wanted)  # noqa: B023
            time.sleep(chance.uniform(0, longest))
            run.signal(signal.SIGSTOP)
        in_a_save += kill % 2 == 0 and bool(half_saved(output) - left)
        killed = [chance.choice(every)] if one else every
        run.signal(signal.SIGKILL, killed if steps_logged(output) > began else every)
        run.signal(signal.SIGCONT)
        statuses, said = run.end()
        assert {statuses[rank] for rank in killed} == {-signal.SIGKILL}, said
        assert 0 not in statuses, said
    return in_a_save


def half_saved(output: Path) -> set[Path]:
    return set((output / "checkpoints").glob(".unfinished-step*"))
