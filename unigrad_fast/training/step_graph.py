"""A training step that a GPU replays: recorded once for each size of the views, launched as a whole from then on.

What a step computes is fixed with the recording, and so are the places of all that it reads and writes: views and
CutMix's pairs are copied to where they lay, rates lie on the device (see `rates`). What the host does in a step it does
not do in a replay; what DeepSpeed counts is made up for here. F's copy in lower precision is brought up to date before
the recording, in which the two then move together: whoever is given F between two replays finds it repaired, as ever.

The first steps with views of a size are launched one by one, as without a graph: in them libraries try their
algorithms and kernels are compiled, and whatever stays is allocated. A size's recording, with the memory of its
activations, is given back when another size comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from unigrad_fast import config
from unigrad_fast.kernels.dispatch import use_triton
from unigrad_fast.objectives import ObjectiveOutput
from unigrad_fast.objectives.correlation import MovingCorrelation
from unigrad_fast.pipelines import Batch
from unigrad_fast.pipelines.cutmix import Mix
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.process_group import World
from unigrad_fast.training.telemetry.phases import PhaseClock

LAUNCHED = 3  # steps with views of a size before one is recorded
COUNTERS = ("global_steps", "micro_steps", "global_samples", "skipped_steps")  # of DeepSpeed's engine

Compute: TypeAlias = "Callable[[Iterable[Batch]], ObjectiveOutput]"
Record: TypeAlias = "Callable[[Callable[[], ObjectiveOutput]], tuple[ObjectiveOutput, Callable[[], None]]]"


def require(world: World) -> None:
    """Raises UserError where a step cannot be recorded on the ranks that there are; see also `Config`."""
    reason = None
    if world.device.type != "cuda":
        reason = "graphs are a GPU's, and this run has none; leave it out"
    elif not use_triton(world.device):
        reason = "with UNIGRAD_KERNELS=torch the host waits within a step; unset one of them"
    elif world.size > 1 and world.backend != "nccl":
        reason = f"{world.size} ranks meet over {world.backend}, for which the host waits; use nccl, or one rank"
    if reason is not None:
        raise UserError(f"engine.cuda_graph = true: {reason}")


def own_stream(settings: config.Engine, device: torch.device) -> AbstractContextManager:
    """A stream of its own for a run that records its steps, as the default stream cannot be recorded."""
    if not settings.cuda_graph or device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


class StepGraph:
    """Computes steps as `compute` does, most of them by a replay.

    Args:
        compute: what a step does on the device, given its micro-batch; the host reads nothing in it.
        engine: DeepSpeed's.
        record: computes nothing, and returns what its argument returned and what computes it, each time anew.

    The output is the same one after each replay, with other numbers in it.
    """

    def __init__(
        self,
        compute: Compute,
        engine,
        objective: nn.Module,
        phases: PhaseClock,
        device: torch.device,
        record: Record | None = None,
    ):
        self.compute, self.engine, self.phases, self.device = compute, engine, phases, device
        self.record = record or record_on_cuda
        self.averages = [module for module in objective.modules() if isinstance(module, MovingCorrelation)]
        self._shapes: list[torch.Size] | None = None
        self._launched = 0
        self._batch: Batch | None = None
        self._output: ObjectiveOutput | None = None
        self._replay: Callable[[], None] | None = None
        self._counted: dict[str, int] = {}

    def __call__(self, batches: Iterable[Batch]) -> ObjectiveOutput:
        (batch,) = batches
        shapes = [view.shape for view in batch.views]
        if shapes != self._shapes:
            self._shapes, self._launched = shapes, 0
            self._replay = self._output = self._batch = None  # its memory is free for what follows
        if self._launched < LAUNCHED:
            self._launched += 1
            return self.compute([batch])
        if self._batch is None:
            self._batch = _empty_like(batch, self.device)
        for ours, theirs in zip(_tensors(self._batch), _tensors(batch), strict=True):
            ours.copy_(theirs, non_blocking=True)
        if self._replay is None:
            self._record_step(self._batch)
        self._replay()
        for name, by in self._counted.items():
            setattr(self.engine, name, getattr(self.engine, name) + by)
        self.phases.mark("step")
        return self._output

    def _record_step(self, batch: Batch) -> None:
        for average in self.averages:
            average.make_current()
        before = {name: getattr(self.engine, name) for name in COUNTERS}
        with self.phases.stopped():
            output, self._replay = self.record(lambda: self.compute([batch]))
        self._output = replace(output, loss=output.loss.detach())
        self._counted = {name: getattr(self.engine, name) - count for name, count in before.items()}
        for name, count in before.items():
            setattr(self.engine, name, count)


def record_on_cuda(compute: Callable[[], ObjectiveOutput]) -> tuple[ObjectiveOutput, Callable[[], None]]:
    """A CUDA graph of what is launched on the current stream, which is not the default one."""
    from unigrad_fast.kernels import multi_tensor

    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks about its events meanwhile, which is forbidden in this thread alone.
    recording = torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local")
    with multi_tensor.captured_tables() as tables, recording:
        output = compute()
    multi_tensor.fill(tables)
    kept = graph, tables  # which are read in each replay

    def replay() -> None:
        kept[0].replay()

    return output, replay


def _empty_like(batch: Batch, device: torch.device) -> Batch:
    """A batch for a copy of this one's views and pairs, on the device."""
    views = [torch.empty_like(view, device=device) for view in batch.views]
    mix = None
    if batch.mix is not None:
        mix = Mix(*(torch.empty_like(each, device=device) for each in _of_mix(batch.mix)))
    return replace(batch, views=views, mix=mix)


def _tensors(batch: Batch) -> list[Tensor]:
    """What the device reads of a batch."""
    return [*batch.views, *([] if batch.mix is None else _of_mix(batch.mix))]


def _of_mix(mix: Mix) -> list[Tensor]:
    return [getattr(mix, field.name) for field in fields(mix)]
