"""The kNN classifier on a run's backbone, during training and from the command line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from unigrad_fast import config
from unigrad_fast.evaluation.components import principal_components
from unigrad_fast.evaluation.knn import KNNResult, over_ranks, sharded_knn
from unigrad_fast.evaluation.passes import new_features
from unigrad_fast.evaluation.rows import Features
from unigrad_fast.evaluation.shares import Share, own_images, share_of
from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime.process_group import World
from unigrad_fast.runtime.wording import count

FINDS_ITSELF = "every image finds itself"  # where validation images are training images


@dataclass(frozen=True)
class KNNProbe:
    """Weighted kNN: training images as the bank, validation images as the queries, centre crops of both.

    Args:
        val: labelled with the classes of `train`; `classes.match` ensures this.
    """

    data: config.Data
    settings: config.Evaluation
    world: World
    train: Manifest
    val: Manifest

    def few_images(self, bank: int) -> str | None:
        """A line for the user if a bank has fewer images than should vote; None otherwise."""
        k = self.settings.knn.k
        if k == "auto" or k <= bank:
            return None
        return f"evaluation.knn.k = {k}: exceeds the {count(bank, 'training image')}, so all of them vote"

    def __call__(
        self,
        backbone: nn.Module,
        dtype: torch.dtype | None,
        image_size: int | None = None,
        crop_fraction: float | None = None,
    ) -> KNNResult:
        """Accuracy and components of a backbone [N, 3, S, S] → [N, D]; all ranks call this together and get the same.

        Args:
            dtype: autocast dtype of the backbone; None for no autocast.
            image_size, crop_fraction: of the centre crops; None takes the run's.

        Raises RunStopped if a feature is not finite or too many images cannot be used.
        """

        def read(manifest: Manifest) -> Features:
            loader = own_images(manifest, self.data, self.settings, self.world, image_size, crop_fraction)
            return new_features(backbone, loader, self.world, dtype, self.data.max_bad_fraction)

        return self.judge(map(read, (self.train, self.val)))

    def judge(self, features: Iterable[Features]) -> KNNResult:
        """Accuracy and components of features of the training, then of the validation images.

        All ranks call this together. Features are asked for one set after the other, and kept as shares.
        """
        shares: list[Share] = []
        for manifest, found in zip((self.train, self.val), features, strict=True):
            if not shares:
                components = principal_components(found, self.world)
            shares.append(share_of(found, manifest.labels, self.world))
        bank, queries = shares
        k: int | Literal["auto"] = self.settings.knn.k
        if k != "auto":  # a run goes on if there are fewer images
            k = min(k, int(over_ranks(torch.tensor(len(bank.labels)), self.world)))
        result = sharded_knn(bank, queries, self.world, k, self.settings.knn.temperature)
        told = (*bank.left_out.told("training"), *queries.left_out.told("validation"))
        return replace(result, left_out=told, components=components)
