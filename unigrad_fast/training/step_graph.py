"""Training steps as a CUDA graph: captured once for each size of the views, then replayed as a whole.

The capture fixes what a step computes and the addresses of everything it reads and writes: views and CutMix's pairs are
copied into fixed buffers, rates are in device memory (see `rates`). A replay skips the host's part of a step;
DeepSpeed's counters are therefore advanced here. F's copy in lower precision is refreshed before the capture, and
captured steps update both together, so F is as consistent between replays as after any other step.

The first steps with views of a given size are launched operator by operator, as without a graph: during them libraries
choose their algorithms, kernels are compiled, and persistent memory is allocated. When the size changes, the previous
graph is freed, with the memory of its activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
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

LAUNCHED = 3  # steps with views of a size before one is captured
COUNTERS = ("global_steps", "micro_steps", "global_samples", "skipped_steps")  # attributes of DeepSpeed's engine

Compute: TypeAlias = "Callable[[Iterable[Batch]], ObjectiveOutput]"
Record: TypeAlias = "Callable[[Callable[[], ObjectiveOutput]], tuple[ObjectiveOutput, Callable[[], None]]]"


def require(world: World) -> None:
    """Raises UserError if a step cannot be captured on this world's ranks; `Config` checks further conditions."""
    reason = None
    if world.device.type != "cuda":
        reason = "needs a GPU, and this run has none; leave it out"
    elif not use_triton(world.device):
        reason = "with UNIGRAD_KERNELS=torch the host waits within a step; unset one of them"
    elif world.size > 1 and world.backend != "nccl":
        reason = f"{world.size} ranks use {world.backend}, for which the host waits; use nccl, or one rank"
    if reason is not None:
        raise UserError(f"engine.cuda_graph = true: {reason}")


def own_stream(settings: config.Engine, device: torch.device) -> AbstractContextManager:
    """A separate stream for a run that captures its steps, because the default stream cannot be captured."""
    if not settings.cuda_graph or device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


class StepGraph:
    """Computes steps like `compute`, most of them by replaying a graph.

    Args:
        compute: the device's part of a step, given its micro-batch; the host reads no result inside it.
        engine: DeepSpeed's engine.
        record: captures its argument without computing; returns the argument's output and a function that replays it.

    Each replay returns the same output object, overwritten with new numbers.
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
            self._replay = self._output = self._batch = None  # frees the memory of the previous graph
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
    """A CUDA graph of the work launched on the current stream, which must not be the default stream."""
    from unigrad_fast.kernels import multi_tensor

    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread queries its events meanwhile; "thread_local" forbids that only in this thread.
    recording = torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local")
    with multi_tensor.captured_tables() as tables, recording:
        output = compute()
    multi_tensor.fill(tables)
    kept = graph, tables  # each replay reads the tables

    def replay() -> None:
        kept[0].replay()

    return output, replay


def _empty_like(batch: Batch, device: torch.device) -> Batch:
    """An uninitialised batch on the device, shaped like this one."""
    views = [torch.empty_like(view, device=device) for view in batch.views]
    mix = None
    if batch.mix is not None:
        mix = Mix(*(torch.empty_like(each, device=device) for each in vars(batch.mix).values()))
    return replace(batch, views=views, mix=mix)


def _tensors(batch: Batch) -> list[Tensor]:
    """The tensors of a batch that the device reads."""
    return [*batch.views, *([] if batch.mix is None else vars(batch.mix).values())]
