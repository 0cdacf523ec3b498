"""Linear probe: a linear classifier on the frozen features of a backbone.

Two protocols train it, `linear_quick` and `linear_paper`. Both are evaluated on centre crops, with every validation
image counted once, and the result depends on the number of ranks only by rounding. Images that cannot be used are left
out, or replaced by others in the paper's training.

Shapes: N images, D feature dimension, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast.config import Config
from unigrad_fast.evaluation.features import count_left_out, evaluation_mode, features_of
from unigrad_fast.evaluation.shares import own_images
from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime.process_group import World, on_all_ranks

WAS_FITTED = "the classifier is fitted to the images that judge it"  # where validation images are training images


@dataclass(frozen=True)
class FrozenEncoder:
    """A backbone [N, 3, S, S] → [N, D] and the images to evaluate it on; all ranks use it together.

    Args:
        val: labelled with the classes of `train`; `classes.match` ensures this.
        backbone: on the world's device.
        dtype: autocast dtype of the backbone; None for no autocast.
        say: prints a line for the user, such as the end of an epoch or images that could not be used.
    """

    config: Config
    world: World
    train: Manifest
    val: Manifest
    backbone: nn.Module
    dtype: torch.dtype | None
    say: Callable[[str], None]

    def judge(self, classifier: nn.Linear) -> tuple[float, float | None, int]:
        """Accuracy of a linear classifier on the validation images; each rank counts its own.

        Returns:
            Top-1 accuracy in percent, top-5 accuracy, which is None with fewer than five classes, and the number of
            images that were classified.

        Raises RunStopped if a feature is not finite or too many images cannot be used.
        """
        loader = own_images(self.val, self.config.data, self.config.evaluation, self.world)
        classes = len(self.train.classes)
        counts = torch.zeros(3, dtype=torch.int64)  # images, top-1 hits, top-5 hits

        def count() -> None:
            for features, index in features_of(self.backbone, loader, self.world.device, self.dtype):
                with torch.no_grad():
                    logits = classifier(features)
                labels = torch.as_tensor(self.val.labels, dtype=torch.int64)[index].to(logits.device)
                best = logits.topk(min(5, classes), dim=1).indices == labels[:, None]
                found = torch.stack([best[:, 0].sum(), best.any(dim=1).sum()])
                counts.add_(torch.tensor([len(index), *found.tolist()]))

        on_all_ranks(count)
        left_out = count_left_out(loader.failures, len(self.val), self.config.data.max_bad_fraction)
        self.tell(left_out.told("validation"))
        dist.all_reduce(counts)
        images, right, among_five = counts.tolist()
        if images + left_out.count != len(self.val):
            raise AssertionError(
                f"of {len(self.val)} validation images {images} were counted and {left_out.count} left out"
            )
        top5 = 100 * among_five / images if classes >= 5 else None
        return 100 * right / images, top5, images

    def features(self, images: Tensor) -> Tensor:
        """Features, fp32 [N, D] on the device, of normalised images [N, 3, S, S]."""
        autocast = torch.autocast(self.world.device.type, self.dtype, enabled=self.dtype is not None)
        with torch.no_grad(), evaluation_mode(self.backbone), autocast:
            return self.backbone(images.to(self.world.device)).float()

    def tell(self, lines: list[str]) -> None:
        for line in lines:
            self.say(line)
