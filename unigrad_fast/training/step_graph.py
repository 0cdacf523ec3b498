"""Training steps as a CUDA graph: captured once for each size of the views, then replayed as a whole.

The capture fixes what a step computes and the addresses of everything it reads and writes: views and CutMix's pairs are
copied into fixed buffers, rates are in device memory (see `rates`). A replay skips the host's part of a step;
DeepSpeed's counters are therefore advanced here. F's copy in lower precision is refreshed before the capture, and
captured steps update both together, so F is as consistent between replays as after any other step. All micro-batches of
a step are one graph, whose buffers hold all their views.

The first steps with views of a given size are launched operator by operator, as without a graph: during them libraries
choose their algorithms, kernels are compiled, and persistent memory is allocated. When the size changes, the previous
graph is freed, with the memory of its activations. Ranks agree on each capture: if it fails on one of them, all launch
their steps from then on. NCCL's collectives can be captured, as long as all ranks capture and replay the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast import config
from unigrad_fast.kernels.dispatch import use_triton
from unigrad_fast.objectives import ObjectiveOutput
from unigrad_fast.objectives.correlation import MovingCorrelation
from unigrad_fast.pipelines import Batch
from unigrad_fast.pipelines.cutmix import Mix
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.process_group import World, gather
from unigrad_fast.runtime.rendezvous import say
from unigrad_fast.training.telemetry.phases import PhaseClock

TRIED = False  # on a GPU; until then "auto" captures nothing
LAUNCHED = 3  # steps with views of a size before one is captured
SHOWN = 200  # characters of the error of a capture
COUNTERS = ("global_steps", "micro_steps", "global_samples", "skipped_steps")  # attributes of DeepSpeed's engine

Compute: TypeAlias = "Callable[[Iterable[Batch]], ObjectiveOutput]"
Record: TypeAlias = "Callable[[Callable[[], ObjectiveOutput]], tuple[ObjectiveOutput, Callable[[], None]]]"


def wanted(settings: config.Config, world: World) -> bool:
    """Whether steps are captured: if asked for, or with "auto" if they can be and this has been tried on a GPU.

    Raises:
        UserError: it is asked for, but this world's ranks cannot; `Config` checks further conditions.
    """
    asked = settings.engine.cuda_graph
    if asked == "auto":
        return TRIED and not settings.graph_obstacles() and obstacle(world) is None
    if asked and (reason := obstacle(world)):
        raise UserError(f"engine.cuda_graph = true: {reason}")
    return bool(asked)


def obstacle(world: World) -> str | None:
    """Why a step cannot be captured on this world's ranks, and the remedy; None if it can."""
    if world.device.type != "cuda":
        return "needs a GPU, and this run has none; leave it out"
    if not use_triton(world.device):
        return "with UNIGRAD_KERNELS=torch the host waits within a step; unset one of them"
    if world.size > 1 and world.backend != "nccl":
        return f"{world.size} ranks use {world.backend}, for which the host waits; use nccl, or one rank"
    return None


def own_stream(settings: config.Config, world: World) -> AbstractContextManager:
    """A separate stream for a run that captures its steps, because the default stream cannot be captured."""
    if world.device.type != "cuda" or not wanted(settings, world):
        return nullcontext()
    stream = torch.cuda.Stream(world.device)
    stream.wait_stream(torch.cuda.current_stream(world.device))
    return torch.cuda.stream(stream)


class StepGraph:
    """Computes steps like `compute`, most of them by replaying a graph.

    Args:
        compute: the device's part of a step, given its micro-batches; the host reads no result inside it.
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
        self._batches: list[Batch] = []
        self._output: ObjectiveOutput | None = None
        self._replay: Callable[[], None] | None = None
        self._counted: dict[str, int] = {}
        self._failed = False

    def __call__(self, batches: Iterable[Batch]) -> ObjectiveOutput:
        if self._failed:
            return self.compute(batches)
        taken = list(batches)
        shapes = [view.shape for batch in taken for view in batch.views]
        if shapes != self._shapes:
            self._shapes, self._launched = shapes, 0
            self._free()
        if self._launched < LAUNCHED:
            self._launched += 1
            return self.compute(taken)
        if not self._batches:
            self._batches = [_empty_like(batch, self.device) for batch in taken]
        for ours, theirs in zip(_tensors(self._batches), _tensors(taken), strict=True):
            ours.copy_(theirs, non_blocking=True)
        if self._replay is None and not self._is_recorded():
            self._failed = True
            self._free()
            return self.compute(taken)
        self._replay()
        for name, by in self._counted.items():
            setattr(self.engine, name, getattr(self.engine, name) + by)
        self.phases.mark("step")
        return self._output

    def _free(self) -> None:
        """Forget the graph, with its memory."""
        self._replay = self._output = None
        self._batches = []

    def _is_recorded(self) -> bool:
        """Record a step; whether all ranks could. Rank 0 says why not."""
        failure = ""
        try:
            self._record_step()
        except RuntimeError as error:
            failure = f"{type(error).__name__}: {' '.join(str(error).split())[:SHOWN]}"
        failures = {rank: each for rank, each in enumerate(gather(failure)) if each}
        if failures and not (dist.is_initialized() and dist.get_rank()):
            rank, said = next(iter(failures.items()))
            say(
                f"WARNING: engine.cuda_graph: rank {rank} could not capture a step ({said}); steps are launched instead"
            )
        return not failures

    def _record_step(self) -> None:
        for average in self.averages:
            average.make_current()
        before = {name: getattr(self.engine, name) for name in COUNTERS}
        try:
            with self.phases.stopped():
                output, self._replay = self.record(lambda: self.compute(self._batches))
            self._output = replace(output, loss=output.loss.detach())
            self._counted = {name: getattr(self.engine, name) - count for name, count in before.items()}
        finally:
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


def _tensors(batches: Iterable[Batch]) -> list[Tensor]:
    """The tensors of batches that the device reads."""
    return [
        tensor
        for batch in batches
        for tensor in (*batch.views, *([] if batch.mix is None else vars(batch.mix).values()))
    ]
