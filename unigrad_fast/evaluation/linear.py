"""Linear probe: a linear classifier on the frozen features of a backbone.

Three protocols train it, `linear_quick`, `linear_paper` and `linear_sweep`. All are evaluated on centre crops, with
every validation image counted once, and the result depends on the number of ranks only by rounding. Images that cannot
be used are left out, or replaced by others in training on random crops.

Shapes: N images, D feature dimension, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast.config import Config
from unigrad_fast.evaluation.features import LeftOut, count_left_out, evaluation_mode, features_of, in_parts
from unigrad_fast.evaluation.rows import Features
from unigrad_fast.evaluation.shares import own_images
from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime.process_group import World, on_all_ranks

WAS_FITTED = "the classifier is fitted to the images that judge it"  # where validation images are training images


def of_heads(logits: Tensor) -> Tensor:
    """Logits of several heads, [N, H, K]; those of a single classifier [N, K] are of one."""
    return logits if logits.dim() == 3 else logits.unsqueeze(1)


@dataclass(frozen=True)
class FrozenEncoder:
    """A backbone [N, 3, S, S] → [N, D] and the images to evaluate it on; all ranks use it together.

    Args:
        val: labelled with the classes of `train`; `classes.match` ensures this.
        backbone: on the world's device.
        dtype: autocast dtype of the backbone; None for no autocast.
        say: prints a line for the user, such as the end of an epoch or images that could not be used.
        left_out: is filled with the number of images that could not be used, by kind ("training", "validation").
    """

    config: Config
    world: World
    train: Manifest
    val: Manifest
    backbone: nn.Module
    dtype: torch.dtype | None
    say: Callable[[str], None]
    left_out: dict[str, int] = field(default_factory=dict, kw_only=True)

    def judge(self, classifier: nn.Module, val: Features | None = None) -> tuple[float, float | None, int]:
        """Accuracy of a linear classifier on the validation images.

        Args:
            val: their features, if these were read before.

        Returns:
            Top-1 accuracy in percent, top-5 accuracy, which is None with fewer than five classes, and the number of
            images that were classified.

        Raises RunStopped if a feature is not finite or too many images cannot be used.
        """
        ((top1, top5),), images = self.judge_heads(classifier, 1, val)
        return top1, top5, images

    def judge_heads(
        self, classifier: nn.Module, heads: int, val: Features | None = None
    ) -> tuple[list[tuple[float, float | None]], int]:
        """As `judge`, for each head of a classifier with so many; each rank counts its own images."""
        loader = own_images(self.val, self.config.data, self.config.evaluation, self.world)
        classes = len(self.train.classes)
        counts = torch.zeros(1 + 2 * heads, dtype=torch.int64)  # images, each head's top-1 hits, its top-5 hits

        def count() -> None:
            read = val.batches(self.world) if val else features_of(self.backbone, loader, self.world.device, self.dtype)
            for features, index in read:
                with torch.no_grad():
                    logits = of_heads(classifier(features))
                labels = torch.as_tensor(self.val.labels, dtype=torch.int64)[index].to(logits.device)
                best = logits.topk(min(5, classes), dim=2).indices == labels[:, None, None]
                found = torch.cat([best[..., 0].sum(0), best.any(dim=2).sum(0)])
                counts.add_(torch.tensor([len(index), *found.tolist()]))

        on_all_ranks(count)
        most = self.config.data.max_bad_fraction
        left_out = val.left_out if val else count_left_out(loader.failures, len(self.val), most)
        self.leave_out("validation", left_out)
        dist.all_reduce(counts)
        images, *hits = counts.tolist()
        if images + left_out.count != len(self.val):
            raise AssertionError(
                f"of {len(self.val)} validation images {images} were counted and {left_out.count} left out"
            )
        top1, top5 = ([100 * each / images for each in part] for part in (hits[:heads], hits[heads:]))
        return list(zip(top1, top5 if classes >= 5 else [None] * heads, strict=True)), images

    def features(self, images: Tensor) -> Tensor:
        """Features, fp32 [N, D] on the device, of normalised images [N, 3, S, S]."""
        autocast = torch.autocast(self.world.device.type, self.dtype, enabled=self.dtype is not None)
        with torch.no_grad(), evaluation_mode(self.backbone), autocast:
            return in_parts(self.backbone, images.to(self.world.device)).float()

    def width(self) -> int:
        """D."""
        size = self.config.data.image_size
        return self.features(torch.zeros(1, 3, size, size)).shape[1]

    def leave_out(self, kind: str, left_out: LeftOut, fate: str = "left out") -> None:
        """Notes and tells the user which images of a kind could not be used."""
        self.left_out[kind] = left_out.count
        for line in left_out.told(kind, fate):
            self.say(line)


@dataclass(frozen=True)
class Judged:
    """A trained classifier and its accuracy on the validation images.

    Attributes:
        accuracy, top5: percent; top5 is None with fewer than five classes.
        images: number of images that were classified.
        figures: further JSON values of the result; said: a line for the user about them.
    """

    accuracy: float
    top5: float | None
    images: int
    classifier: nn.Linear
    figures: Mapping[str, Any] = field(default_factory=dict)
    said: str = ""

    @classmethod
    def by(cls, encoder: FrozenEncoder, classifier: nn.Linear, val: Features | None = None) -> Judged:
        return cls(*encoder.judge(classifier, val), classifier)
