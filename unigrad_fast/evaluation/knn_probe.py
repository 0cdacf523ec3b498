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
    """Weighted kNN: training images as the bank, validation images as the queries, centre crops of both."""

    config: Config
    world: World
    train: Manifest
    val: Manifest

    @staticmethod
    def obstacle(train: Manifest, val: Manifest | None) -> str | None:
        """Why the encoder cannot be evaluated, in words for the user; None when it can."""
        if val is None:
            return "no validation images (data.val)"
        if not (train.has_labels and val.has_labels):
            unlabelled = "training" if not train.has_labels else "validation"
            return f"the {unlabelled} images have no labels (class folders, labels in a list, or .cls in shards)"
        if list(train.classes) != list(val.classes):
            differing = [
                f"{kind} {', '.join(sorted(set(one.classes) - set(other.classes))[:3]) or 'has none of these'}"
                for kind, one, other in (("training", train, val), ("validation", val, train))
            ]
            return f"training and validation images have different classes ({'; '.join(differing)})"
        if len(train.classes) < 2:
            return f"all images are of one class, {train.classes[0]}; the class folders may lie one level lower"
        return None

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
