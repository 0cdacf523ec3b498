"""The encoder: a backbone with a projector, over all views of a step.

Shape suffixes: N images per rank, H and W pixels, D feature dimension, C embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from unigrad_fast import config
from unigrad_fast.kernels.dispatch import acts_as_cuda
from unigrad_fast.networks.backbones import build_backbone
from unigrad_fast.networks.batch_norm import convert
from unigrad_fast.networks.residual import fuse
from unigrad_fast.networks.small_convolution import use_small_convolutions


def build_projector(feature_dim: int, settings: config.Projector) -> nn.Sequential:
    """The projection MLP (the paper, appendix "Implementation Details").

    `depth − 1` times linear without bias, batch norm and ReLU, then a linear layer with bias; hidden and output
    width are the same. Maps features [N, D] to embeddings [N, C].
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

    Batch statistics are taken per group of views: with "per_view" each view by itself, with "per_size" all views
    of one size together, with "auto" each of the two global views by itself and local crops of one size together.

    Attributes:
        one_pass: groups of one size pass together, their statistics separate all the same; otherwise one by one.
    """

    def __init__(self, settings: config.Model):
        super().__init__()
        self.backbone = build_backbone(settings.backbone, settings.stem)
        self.projector = build_projector(self.backbone.feature_dim, settings.projector)
        self.batch_statistics = settings.batch_statistics
        self.groups = convert(self, synchronised=settings.sync_batch_norm)
        self.one_pass = False
        fuse(self.backbone, self.projector)

    def forward(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Views, each [N, 3, H, W] (sizes may differ), to their embeddings, each [N, C], in the same order."""
        embeddings: list[Tensor | None] = [None] * len(views)
        for groups in self._passes(views):
            numbers = [i for group in groups for i in group]
            together = torch.cat([views[i] for i in numbers]) if len(numbers) > 1 else views[numbers[0]]
            self.groups.count = len(groups)
            parts = self.projector(self.backbone(together)).chunk(len(numbers))
            for i, part in zip(numbers, parts, strict=True):
                embeddings[i] = part
        return embeddings

    def recompute_projector(self) -> None:
        """From now on backward computes again what the projector can do without in the meantime; the same bits."""
        self.projector.contexts = self.groups.repeatable

    def _passes(self, views: Sequence[Tensor]) -> list[list[list[int]]]:
        """Groups that pass together: equally large ones of one size."""

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


def build_encoder(settings: config.Model, seed: int, device: torch.device) -> Encoder:
    """The encoder as it is before the first step, a function of its settings and the seed alone; in training mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = Encoder(settings)
    if not acts_as_cuda(device):
        use_small_convolutions(encoder)
    encoder.one_pass = acts_as_cuda(device)
    return encoder.to(device).train()
