"""Locates every parameter's elements, gradient and optimizer state in memory, at each ZeRO stage.

At stage 0 every rank holds all of them. At stages 1 and 2 DeepSpeed gives the optimizer one flat fp32 partition per
parameter group and rank, which holds a range of a parameter's elements, or none of them. Only this module knows which;
code that needs layer norms or state by name builds on it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from unigrad_fast.optimization.gated import Gated, Stretch
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.process_group import gather
from unigrad_fast.training import deepspeed_private


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + numel) of a named tensor, in row-major order, as this rank holds them.

    `tensor` is the memory of exactly these elements; if it is not one-dimensional, it is the whole tensor, in any
    memory layout. `replicated`: all ranks hold the same.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    tensor: Tensor
    replicated: bool


def whole(name: str, tensor: Tensor) -> Fragment:
    """A tensor that every rank holds, whole."""
    return Fragment(name, tuple(tensor.shape), 0, tensor.detach(), replicated=True)


class WholeFragments:
    """Stage 0: parameters, gradients and optimizer state are whole on every rank."""

    sharded = False

    def __init__(self, engine, optimizer: Gated):
        self.named = list(engine.module.named_parameters())
        self.optimizer = optimizer

    def parameters(self) -> Iterator[Fragment]:
        for name, parameter in self.named:
            yield whole(name, parameter)

    def kept(self, kind: str) -> Iterator[Fragment]:
        """One kind of optimizer state, out of the optimizer's `kinds`, by parameter."""
        for name, parameter in self.named:
            yield whole(name, self.optimizer.state_of(parameter)[kind])

    def gradients(self) -> list[Tensor]:
        """This rank's part of the gradient, between the last micro-batch's backward and the step."""
        return [parameter.grad for _, parameter in self.named if parameter.grad is not None]

    def refresh(self) -> None:
        """Update the network's weights after the parameters' fragments were written."""

    def take(self, parameters: Iterable[Tensor]) -> None:
        """Update the parameters' fragments after these weights of the network were written, the same on all ranks."""


class PartitionedFragments:
    """Stages 1 and 2: optimizer state and master weights are split over the ranks, in a flat tensor per group.

    Attributes:
        stretches: this rank's pieces of parameters in the flat tensors, which they fill in this order except for
            padding.
    """

    sharded = True

    def __init__(self, engine, optimizer: Gated):
        self.named = list(engine.module.named_parameters())
        self.zero, self.optimizer = engine.optimizer, optimizer
        number_of = {id(parameter): number for number, (_, parameter) in enumerate(self.named)}
        self.flats = deepspeed_private.flat_masters(self.zero)
        self.stretches, self.starts = [], []  # and the first element of each in its parameter
        for flat, group in zip(self.flats, deepspeed_private.parameter_groups(self.zero), strict=True):
            for parameter in group:
                if place := deepspeed_private.place_of(parameter):
                    start, in_flat, numel = place
                    self.stretches.append(Stretch(flat, in_flat, numel, number_of[id(parameter)]))
                    self.starts.append(start)
        optimizer.divide(self.stretches, len(self.named))

    def parameters(self) -> Iterator[Fragment]:
        return self._fragments(lambda flat: flat.detach())

    def kept(self, kind: str) -> Iterator[Fragment]:
        kept = [self.optimizer.state_of(flat)[kind] for flat in self.flats]
        if kept[0].ndim:
            yield from self._fragments(lambda flat: self.optimizer.state_of(flat)[kind])
            return
        groups = deepspeed_private.parameter_groups(self.zero)
        for value, group in zip(kept, groups, strict=True):  # one value for all parameters of a flat tensor
            members = {id(parameter) for parameter in group}
            yield from (whole(name, value) for name, parameter in self.named if id(parameter) in members)

    def gradients(self) -> list[Tensor]:
        """The gradient of each stretch; the rest of DeepSpeed's tensors is padding."""
        found = []
        for number, flat in enumerate(self.flats):
            parts = deepspeed_private.gradient_parts(self.zero)[number]
            starts = list(accumulate((part.numel() for part in parts), initial=0))
            for stretch in self.stretches:
                if stretch.flat is flat:
                    part = bisect_right(starts, stretch.place) - 1
                    offset = stretch.place - starts[part]
                    found.append(parts[part].reshape(-1)[offset : offset + stretch.numel])
        return found

    @torch.no_grad()
    def take(self, parameters: Iterable[Tensor]) -> None:
        written = {id(parameter) for parameter in parameters}
        for stretch, start in zip(self.stretches, self.starts, strict=True):
            _, parameter = self.named[stretch.number]
            if id(parameter) in written:
                stretch.of(stretch.flat).copy_(parameter.reshape(-1)[start : start + stretch.numel])

    def _fragments(self, of_flat: Callable[[Tensor], Tensor]) -> Iterator[Fragment]:
        for stretch, start in zip(self.stretches, self.starts, strict=True):
            name, parameter = self.named[stretch.number]
            yield Fragment(name, tuple(parameter.shape), start, stretch.of(of_flat(stretch.flat)), replicated=False)

    @torch.no_grad()
    def refresh(self) -> None:
        # On gloo, DeepSpeed's gather would need as much memory as all weights; a broadcast needs none.
        for flat, (parts, group) in zip(self.flats, deepspeed_private.weight_parts(self.zero), strict=True):
            parts[dist.get_rank(group)].data.copy_(flat)
            for source, part in enumerate(parts):
                dist.broadcast(part.data, group=group, group_src=source)


Fragments = WholeFragments | PartitionedFragments


def build_fragments(engine, optimizer: Gated) -> Fragments:
    """The adapter for the engine's stage, checked against the engine's own weights; all ranks call this together.

    Raises:
        UserError: a DeepSpeed setting or version that lays out parameters differently.
    """
    stage = engine.zero_optimization_stage()
    refused = {
        "round_robin_gradients": engine.zero_round_robin_gradients(),
        "elastic_checkpoint": engine.zero_elastic_checkpoint(),
        "load_universal": engine.load_universal_checkpoint(),
    }
    reasons = {
        "round_robin_gradients": "it reorders parameters and makes DeepSpeed's own table of their places wrong",
        "elastic_checkpoint": "it supports only Adam's state; checkpoints here fit any number of ranks without it",
        "load_universal": "it supports only Adam's state; checkpoints here fit any stage without it",
    }
    for name, on in refused.items():
        if on:
            raise UserError(f"DeepSpeed's {name} is on: {reasons[name]}; remove it from the configuration")
    fragments, places, problem = None, {}, None
    try:
        fragments = WholeFragments(engine, optimizer) if stage == 0 else PartitionedFragments(engine, optimizer)
        places, problem = _compare(fragments)
    except AttributeError as error:
        problem = str(error)
    answers = gather((places, problem))
    problem = next((problem for _, problem in answers if problem), None)
    if problem is None and fragments.sharded:
        problem = _gap(fragments, [places for places, _ in answers])
    if problem is not None:
        raise UserError(
            f"DeepSpeed {version('deepspeed')} does not keep parameters where this package expects them at ZeRO stage "
            f"{stage} ({problem}); install deepspeed==0.19.8, or use engine.zero_stage 0"
        )
    return fragments


@torch.no_grad()
def _compare(fragments: Fragments) -> tuple[dict[str, tuple[int, int]], str | None]:
    """First element and number of elements of each of this rank's pieces; and any problem with their values."""
    weights, places = dict(fragments.named), {}
    for fragment in fragments.parameters():
        numel = fragment.tensor.numel()
        expected = weights[fragment.name].reshape(-1)[fragment.start : fragment.start + numel]
        if not torch.equal(fragment.tensor.reshape(-1), expected.to(fragment.tensor.dtype)):
            return places, f"the piece of {fragment.name} differs from the parameter"
        places[fragment.name] = fragment.start, numel
    return places, None


def _gap(fragments: Fragments, ranks: list[dict[str, tuple[int, int]]]) -> str | None:
    """A parameter that the pieces of all ranks do not cover exactly once; None if they cover all."""
    for name, parameter in fragments.named:
        place = 0
        for start, numel in sorted(places[name] for places in ranks if name in places):
            if start != place:
                return f"elements {place} to {start} of {name} are missing or found twice"
            place += numel
        if place != parameter.numel():
            return f"only {place} of {parameter.numel()} elements of {name} are found"
    return None
