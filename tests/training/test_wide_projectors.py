"""ResNet-18 with the widest projectors that a machine with 24 GiB holds: real steps of two ranks, saved and loaded."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from command_process import start_ranks
from drawn_images import draw_tree

from unigrad_fast.checkpoints.files import latest
from unigrad_fast.config import Model
from unigrad_fast.networks.encoder import Encoder
from unigrad_fast.runtime.collectives import CollectiveSpy

RANKS, STEPS = 2, 4
GIB = 2**30
BESIDE = 1.8  # GiB of a rank that are not counted: its libraries, and what a layer's gradient takes on its way


def weights(width: int, depth: int) -> float:
    """GiB of all weights in fp32."""
    with torch.device("meta"):
        network = Encoder(Model(backbone="resnet18", stem="imagenet", projector={"depth": depth, "width": width}))
    return 4 * sum(p.numel() for p in network.parameters()) / GIB


def counted(width: int, depth: int, shards: int) -> float:
    """GiB of a rank at stages 1 and 2, at most.

    That is at the end of a step: weights and target; this rank's part of the fp32 weights, of momentum, and of the
    gradient, of which DeepSpeed makes one tensor more; F; and what gloo takes to gather the weights, as much as they.
    """
    return weights(width, depth) * (3 + 4 / RANKS) + 4 * width**2 / shards / GIB


def of_this_process(name: str) -> float:
    """GiB that `/proc/self/status` says."""
    return int(re.search(rf"^{name}:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) / 2**20


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """A line for each build, step, save and load of this rank: GiB there and at most, bytes of a step's collectives."""
    from unigrad_fast.training import checkpoint
    from unigrad_fast.training.trainer import Trainer

    def watch(what: str, work: Callable) -> Callable:
        def call(*arguments, **settings):
            Path("/proc/self/clear_refs").write_text("5")
            before, spy = of_this_process("VmRSS"), CollectiveSpy()
            with spy if what == "step" else nullcontext():
                result = work(*arguments, **settings)
            sent = {kind: each.bytes for kind, each in spy.found.items()}
            there = max(before, of_this_process("VmRSS"))  # what is loaded may be touched for the first time
            row = {"what": what, "there": there, "most": of_this_process("VmHWM"), "sent": sent}
            with (folder / f"rank-{os.environ['RANK']}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            return result

        return call

    with (
        mock.patch.object(Trainer, "__init__", watch("build", Trainer.__init__)),
        mock.patch.object(Trainer, "step", watch("step", Trainer.step)),
        mock.patch.object(checkpoint, "save", watch("save", checkpoint.save)),
        mock.patch.object(checkpoint, "restore", watch("restore", checkpoint.restore)),
    ):
        yield


def available() -> float:
    return int(re.search(r"^MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)[1]) / 2**20


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("width", "depth", "stage", "placement"),
    [
        (8192, 3, 1, "replicated"),
        (16384, 2, 2, "sharded"),
        (16384, 2, 2, "replicated"),
        (16384, 3, 2, "sharded"),  # more than 24 GiB, as is the next
        (16384, 3, 2, "replicated"),
    ],
)
def test_two_ranks_train_save_and_load_a_wide_projector(tmp_path, record_property, width, depth, stage, placement):
    expected = counted(width, depth, shards=RANKS if placement == "sharded" else 1)
    if available() < RANKS * (expected + BESIDE):
        pytest.skip(f"needs {RANKS * (expected + BESIDE):.1f} GiB of memory, of which {available():.1f} are free")
    draw_tree(tmp_path / "train", per_class=8)
    given = {
        "recipe": "cifar_subset", "data.train": tmp_path / "train", "data.batch_size": 8, "data.threads": 1,
        "model.projector.width": width, "model.projector.depth": depth, "objective.correlation_source": "target",
        "objective.placement": placement, "engine.zero_stage": stage, "engine.precision": "fp32", "schedule.epochs": 2,
        "schedule.warmup_epochs": 0,
        "evaluation.every": 0, "telemetry.every": 1, "telemetry.tensorboard": "false", "checkpoint.every": 2,
        "output": tmp_path / "run",
    }  # fmt: skip
    words = [word for key, value in given.items() for word in (f"--{key}", value)]
    for _ in range(2):  # the second time it is loaded
        processes = start_ranks(RANKS, "pretrain", *words, inside=[partial(watched, tmp_path)])
        ended = [process.end(1800) for process in processes]
        assert [each.returncode for each in ended] == [0, 0], ended
    assert "this run is complete" in ended[0].stdout
    events = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "train"]
    assert len(losses) == STEPS and all(abs(loss) < 100 for loss in losses)
    most, rises, sent = defaultdict(float), defaultdict(float), []
    for rank in range(RANKS):
        rows = [json.loads(line) for line in (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines()]
        for row in rows:
            most[row["what"]] = max(most[row["what"]], row["most"])
            rises[row["what"]] = max(rises[row["what"]], row["most"] - row["there"])
        sent.append([row["sent"] for row in rows if row["what"] == "step"][1])
    record_property("GiB of a rank, counted", round(expected, 2))
    for what in ("build", "step"):
        record_property(f"in a {what}", round(most[what], 2))
    for what in ("save", "restore"):
        record_property(f"more in a {what}", round(rises[what], 2))
    size = sum(file.stat().st_size for file in latest(tmp_path / "run").iterdir())
    record_property("GiB of a checkpoint", round(size / GIB, 2))
    for kind, size in sent[0].items():
        record_property(f"MB of {kind}s in a step", round(size / 1e6, 1))
    assert most["step"] < expected + BESIDE
    assert max(rises["save"], rises["restore"]) < 0.5
