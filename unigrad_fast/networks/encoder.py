"""The encoder: a backbone and a projector, applied to all views of a step.

Shape suffixes: N images per rank, H and W pixels, D feature dimension, C embedding width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from unigrad_fast import config
from unigrad_fast.kernels.dispatch import acts_as_cuda
from unigrad_fast.networks import norm_convolution
from unigrad_fast.networks.backbones import build_backbone
from unigrad_fast.networks.batch_norm import convert
from unigrad_fast.networks.lockstep import Steps, alone, steps_of
from unigrad_fast.networks.residual import fuse
from unigrad_fast.networks.small_convolution import use_small_convolutions


def build_projector(feature_dim: int, settings: config.Projector) -> nn.Sequential:
    """The projection MLP (the paper, appendix "Implementation Details").

    `depth − 1` blocks of linear without bias, batch norm and ReLU, then a linear layer with bias; hidden and output
    width are equal. Maps features [N, D] to embeddings [N, C].
    """
    layers: list[nn.Module] = []
    inputs = feature_dim
    for _ in range(settings.depth - 1):
        linear = nn.Linear(inputs, settings.width, bias=False)
        layers += [linear, nn.BatchNorm1d(settings.width), nn.ReLU(inplace=True)]
        inputs = settings.width
    return nn.Sequential(*layers, nn.Linear(inputs, settings.width))


class Encoder(nn.Module):
    """Backbone and projector of one branch, applied to all views of a step in one call.

    Batch statistics are computed per group of views: with "per_view" each view is a group, with "per_size" all views
    of one size, with "auto" each of the two global views and all local crops of one size.

    Attributes:
        one_pass: groups of the same size share a forward pass, still with separate statistics; otherwise each group
            has its own pass.
    """

    def __init__(self, settings: config.Model):
        super().__init__()
        self.backbone = build_backbone(settings.backbone, settings.stem)
        self.projector = build_projector(self.backbone.feature_dim, settings.projector)
        self.batch_statistics = settings.batch_statistics
        self.groups = convert(self, synchronised=settings.sync_batch_norm)
        self.one_pass = False
        fuse(self.backbone, self.projector)

    def forward(self, views: Sequence[Tensor], run: Callable[[Steps], Any] = alone) -> Any:
        """Map views, each [N, 3, H, W] (sizes may differ), to embeddings, each [N, C], in the same order.

        Args:
            run: what runs the pass, and returns the embeddings, or more than these (see `lockstep`).
        """
        return run(self.steps(views))

    def steps(self, views: Sequence[Tensor]) -> Steps:
        """The forward pass, pausing before each norm."""
        embeddings: list[Tensor | None] = [None] * len(views)
        for groups in self._passes(views):
            numbers = [i for group in groups for i in group]
            self.groups.count = len(groups)
            features = yield from steps_of(self.backbone, joined([views[i] for i in numbers]))
            parts = yield from steps_of(self.projector, features)
            for i, part in zip(numbers, parts.chunk(len(numbers)), strict=True):
                embeddings[i] = part
        return embeddings

    def recompute_projector(self) -> None:
        """From now on recompute the projector's cheap intermediate results in backward; results stay bitwise equal."""
        self.projector.contexts = self.groups.repeatable

    def _passes(self, views: Sequence[Tensor]) -> list[list[list[int]]]:
        """Groups of each forward pass: those with equally many views of one size share a pass."""

        def key(numbered: tuple[int, list[int]]):
            number, group = numbered
            together = (tuple(views[group[0]].shape), len(group))
            return (*together, 0 if self.one_pass else number)

        found = groupby(enumerate(self._groups(views)), key=key)
        return [[group for _, group in groups] for _, groups in found]

    def _groups(self, views: Sequence[Tensor]) -> list[list[int]]:
        def key(i: int):
            size = tuple(views[i].shape[-2:])
            if self.batch_statistics == "per_view" or (self.batch_statistics == "auto" and i < 2):
                return (size, i)
            return (size, -1)

        return [list(group) for _, group in groupby(sorted(range(len(views)), key=key), key=key)]


def joined(views: Sequence[Tensor]) -> Tensor:
    """Views, each [N, 3, H, W], as one tensor [V·N, 3, H, W] in the dtype in which autocast convolves.

    Of views that are the chunks of such a tensor, in order, it is this tensor. A single other view stays as it is.
    """
    first = views[0]
    whole = None if torch.compiler.is_compiling() else first._base  # a traced graph has no storage to compare
    if whole is not None and _are_chunks(views, whole):
        return whole
    if len(views) == 1:
        return first
    device, dtype = first.device.type, first.dtype
    if torch.is_autocast_enabled(device) and dtype == torch.float32:
        dtype = torch.get_autocast_dtype(device)
    channels_last = first.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    shape = (len(views) * len(first), *first.shape[1:])
    whole = torch.empty(shape, dtype=dtype, device=first.device, memory_format=layout)
    for part, view in zip(whole.chunk(len(views)), views, strict=True):
        part.copy_(view)
    return whole


def _are_chunks(views: Sequence[Tensor], whole: Tensor) -> bool:
    def place(view: Tensor) -> tuple[torch.Size, int]:
        return view.shape, view.storage_offset()

    return all(view._base is whole for view in views) and (
        [place(view) for view in views] == [place(part) for part in whole.chunk(len(views))]
    )


def build_encoder(settings: config.Model, seed: int, device: torch.device) -> Encoder:
    """The untrained encoder in training mode; depends only on its settings and the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = Encoder(settings)
    if not acts_as_cuda(device):
        use_small_convolutions(encoder)
    elif norm_convolution.TRIED:
        norm_convolution.use_norm_convolutions(encoder)
    encoder.one_pass = acts_as_cuda(device)
    return encoder.to(device).train()
