"""The target branch on a stream of its own: in which order the streams wait, and when it is refused."""

from __future__ import annotations

import weakref
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from trainer_state import batches, make_trainer, small_config

from unigrad_fast.benchmarks.device_check import step as device_check_step
from unigrad_fast.config import resolve
from unigrad_fast.objectives import UniGrad
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.process_group import World
from unigrad_fast.training import branches
from unigrad_fast.training.target_stream import TargetStream


@contextmanager
def streams(events: list[str]):
    """Streams that note in which order they are used."""

    class Stream:
        def __init__(self, name: object):
            self.name = name if isinstance(name, str) else "target's"

        def wait_stream(self, other):
            events.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def stream(entered: Stream):
        events.append(f"on {entered.name}")
        yield
        events.append(f"off {entered.name}")

    current = Stream("current")
    with (
        mock.patch.object(torch.cuda, "Stream", Stream),
        mock.patch.object(torch.cuda, "stream", stream),
        mock.patch.object(torch.cuda, "current_stream", lambda: current),
    ):
        yield


def on_a_gpu(ranks: int = 1) -> World:
    return World(0, ranks, 0, ranks, torch.device("cuda", 0), "nccl")


def order_of_a_step(images: str) -> list[str]:
    config = small_config(images)
    trainer = make_trainer(config)
    events: list[str] = []

    def noting(name: str, function):
        return lambda *args, **keywords: (events.append(name), function(*args, **keywords))[1]

    engine = config.engine.model_copy(update={"target_stream": True})
    with ExitStack() as stack:
        stack.enter_context(streams(events))
        trainer.target_stream = TargetStream(engine, config.model, on_a_gpu())
        stack.enter_context(mock.patch.object(branches, "embed", noting("target", branches.embed)))
        network = trainer.online.module
        stack.enter_context(mock.patch.object(network, "forward", noting("online", network.forward)))
        stack.enter_context(mock.patch.object(UniGrad, "forward", noting("objective", UniGrad.forward)))
        stack.enter_context(mock.patch.object(branches, "update_target_", noting("update", branches.update_target_)))
        trainer.step(0, batches(trainer))
    return events


def test_the_target_waits_for_the_step_before_it_and_the_objective_for_the_target(images, workers):
    assert workers(1).run(order_of_a_step, str(images))[0] == [
        "target's waits for current",
        "on target's",
        "target",
        "off target's",
        "online",
        "current waits for target's",
        "objective",
        "update",
    ]


class Memory:
    """Of DALI: its event is waited for when a tensor is made of it, and it is used again when the last one is gone."""

    def __init__(self, events: list[str]):
        self.events, self.numbers = events, np.zeros((2, 3, 8, 8), np.float32)

    def __dlpack_device__(self):
        return self.numbers.__dlpack_device__()

    def __dlpack__(self, **_):
        self.events.append("current waits for DALI's")
        weakref.finalize(self.numbers, self.events.append, "memory is used again")
        capsule, self.numbers = self.numbers.__dlpack__(), None
        return capsule


def test_dalis_memory_is_used_again_only_once_the_current_stream_waits_for_the_targets():
    """Also if CutMix has put other views in the place of those that the target reads, and nobody else holds them."""
    events: list[str] = []
    with streams(events):
        stream = TargetStream(*settings(), on_a_gpu())
        views = [torch.from_dlpack(Memory(events))]
        with torch.no_grad(), stream.beside(views):
            events.append("target reads")
        views = [views[0] + 1]
        events.append("online")
        stream.join()
        events.append("objective")
    assert events == [
        "current waits for DALI's",
        "target's waits for current",
        "on target's",
        "target reads",
        "off target's",
        "online",
        "current waits for target's",
        "memory is used again",
        "objective",
    ]


def settings(target_stream: bool = True, **model):
    given = {"data": {"train": "x"}, "engine": {"target_stream": target_stream}, "model": model}
    config = resolve("cifar_subset", given)
    return config.engine, config.model


def test_without_a_gpu_it_is_refused():
    with pytest.raises(UserError, match=r"engine\.target_stream = true: .* leave it out"):
        TargetStream(*settings(), World(0, 1, 0, 1, torch.device("cpu"), "gloo"))


def test_batch_norm_over_ranks_is_refused_and_batch_norm_of_a_rank_is_not():
    with pytest.raises(UserError, match=r"on 2 ranks the batch norms .* model\.sync_batch_norm false"):
        TargetStream(*settings(), on_a_gpu(2))
    with streams([]):
        TargetStream(*settings(sync_batch_norm=False), on_a_gpu(2))
        TargetStream(*settings(), on_a_gpu(1))


def test_off_it_asks_nothing_of_the_device():
    stream = TargetStream(*settings(target_stream=False), SimpleNamespace(device=torch.device("cpu"), size=1))
    with stream.beside([torch.zeros(1)]):
        pass
    stream.join()


def test_the_device_check_compares_both_ways_of_running_the_branches():
    """On the CPU, where streams that note their use stand for a card's."""
    cpu = torch.device("cpu")
    events: list[str] = []
    with streams(events), mock.patch("unigrad_fast.training.target_stream.TargetStream.__init__", on_any_device):
        (found,) = device_check_step.target_stream(cpu, "resnet18", images=2, side=32)
    assert found[1:] == ("0 tensors differ", True)
    assert events.count("current waits for target's") == device_check_step.REPEATS


def on_any_device(self, engine, model, world):
    self._stream, self._read = torch.cuda.Stream(0) if engine.target_stream else None, []
