"""The kNN classifier on a run's backbone: during training, and from the command line."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from unigrad_fast.config import Config
from unigrad_fast.evaluation.features import extract
from unigrad_fast.evaluation.knn import KNNResult, weighted_knn
from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime.process_group import World


@dataclass(frozen=True)
class KNNProbe:
    """Weighted kNN: training images as the bank, validation images as the queries, centre crops of both.

    Args:
        val: labelled as `train` is, which `classes.match` sees to.
    """

    config: Config
    world: World
    train: Manifest
    val: Manifest

    def __call__(
        self,
        backbone: nn.Module,
        dtype: torch.dtype | None,
        image_size: int | None = None,
        crop_fraction: float | None = None,
    ) -> KNNResult:
        """Accuracy of a backbone [N, 3, S, S] → [N, D]; all ranks call this together and get the same.

        Args:
            dtype: that the backbone computes in under autocast; None is its own.
            image_size, crop_fraction: of the centre crops; None are the run's.

        Raises RunStopped where a feature is not finite or too many images cannot be used.
        """
        data, settings = self.config.data, self.config.evaluation
        (*bank, bank_left_out), (*queries, queries_left_out) = (
            extract(
                backbone,
                manifest,
                image_size=image_size or data.image_size,
                crop_fraction=crop_fraction or settings.crop_fraction,
                batch_size=settings.batch_size,
                device=self.world.device,
                rank=self.world.rank,
                world_size=self.world.size,
                autocast_dtype=dtype,
                threads=data.threads,
                decode="cpu" if data.decode == "cpu" else None,
                timeout=data.read_timeout,
                max_bad_fraction=data.max_bad_fraction,
            )
            for manifest in (self.train, self.val)
        )
        result = weighted_knn(
            *bank,
            *queries,
            settings.knn.k,
            settings.knn.temperature,
            device=self.world.device,
            rank=self.world.rank,
            world_size=self.world.size,
        )
        return replace(result, left_out=(*bank_left_out.told("training"), *queries_left_out.told("validation")))
