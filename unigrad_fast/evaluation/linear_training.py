"""Training of linear classifiers on the frozen features of random crops.

Several classifiers ("heads") may be trained side by side on one pass of features.

Shapes: N images, H heads, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast.evaluation import crop_training
from unigrad_fast.evaluation.crop_training import CropTraining
from unigrad_fast.evaluation.features import non_finite
from unigrad_fast.evaluation.linear import FrozenEncoder
from unigrad_fast.evaluation.unfinished import Unfinished
from unigrad_fast.optimization.schedules import learning_rate
from unigrad_fast.pipelines import Batch
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.preemption import Preemption
from unigrad_fast.runtime.wording import count


@dataclass(frozen=True)
class ProbeSchedule:
    """Epochs, images per step over all ranks, and learning rate per 256 images; of several heads the largest rate."""

    epochs: int
    batch_size: int
    base_lr: float


@dataclass(frozen=True)
class Method:
    """What is trained, and how.

    Attributes:
        build: the classifier for a feature dimension, a number of classes and a seed; its logits are [N, K], or those
            of several heads, [N, H, K].
        optimizer: the optimizer for parameters and a learning rate, with momentum and without weight decay.
        kind: kind of the learning rate's schedule, without warm-up and down to 0; see `learning_rate`.
        shares: the learning rate of each head as a share of the schedule's. SGD is linear in the gradient, so each
            head's loss has its share as a factor.
    """

    build: Callable[[int, int, int], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter], float], Any]
    kind: str
    shares: tuple[float, ...] = (1.0,)


def train(
    encoder: FrozenEncoder,
    schedule: ProbeSchedule,
    method: Method,
    unfinished: Unfinished | None = None,
    preemption: Preemption | None = None,
) -> nn.Module:
    """A classifier, trained on random crops, new ones in each epoch.

    Args:
        unfinished: file of an interrupted training, and of the progress of this one; None saves nothing.
        preemption: tells when to stop.

    Raises:
        UserError: the batch is larger than the number of images.
        DataError: the batch does not divide over the ranks, there are fewer images than one batch, or too many
            in a row cannot be read.
        RunStopped: a feature or the loss is not finite, or too many images cannot be used.
        Preempted: after saving.
    """
    world = encoder.world
    if schedule.batch_size > len(encoder.train):
        largest = len(encoder.train) // world.size * world.size
        smaller = " or less" if largest > world.size else ""
        raise UserError(
            f"batch_size = {schedule.batch_size}: there are only {count(len(encoder.train), 'training image')}; "
            + (
                f"give --batch_size {largest}{smaller}"
                if largest
                else f"use at most {count(len(encoder.train), 'rank')}"
            )
        )
    parts = micro_batches(schedule.batch_size, world.size, encoder.config.evaluation.batch_size)
    training = crop_training.run(
        encoder, schedule.batch_size, parts, partial(Training, encoder, schedule, method), unfinished, preemption
    )
    return training.network


class Training(CropTraining):
    """The training of a classifier, or of several side by side."""

    name = "the classifier"

    def __init__(self, encoder: FrozenEncoder, schedule: ProbeSchedule, method: Method, steps_per_epoch: int) -> None:
        self.schedule, self.method = schedule, method
        self.peak = schedule.base_lr * schedule.batch_size / 256
        device = encoder.world.device
        classifier = method.build(encoder.width(), len(encoder.train.classes), encoder.config.seed).to(device)
        optimizer = method.optimizer(classifier.parameters(), self.peak)
        sizes = (schedule.batch_size, schedule.epochs, steps_per_epoch)
        super().__init__(encoder, classifier, optimizer, *sizes, method.shares)
        self.odd = torch.tensor(len(encoder.train), device=device)  # the first image with a non-finite feature

    @property
    def remedy(self) -> str:
        return f"lower base_lr = {self.schedule.base_lr:g}"

    def logits(self, batch: Batch) -> Tensor:
        features = self.encoder.features(batch.views[0])
        index = batch.index.to(features.device)
        self.odd = torch.where(features.isfinite().all(dim=1), self.odd, index).amin().minimum(self.odd)
        return self.network(features)

    def set_rates(self) -> None:
        self.optimizer.param_groups[0]["lr"] = learning_rate(
            self.steps_done, self.steps, peak=self.peak, warmup_steps=0, kind=self.method.kind, min_fraction=0.0
        )

    def rates_shown(self, head: int) -> str:
        return f"{self.optimizer.param_groups[0]['lr'] * self.method.shares[head]:.2e}"

    def end_epoch(self) -> None:
        dist.all_reduce(self.odd, dist.ReduceOp.MIN)
        if self.odd < len(self.encoder.train):
            raise non_finite(self.encoder.train, int(self.odd))
        super().end_epoch()

    def state(self) -> dict[str, Any]:
        odd = self.odd.clone()
        dist.all_reduce(odd, dist.ReduceOp.MIN)
        return {**super().state(), "odd": int(odd)}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.odd.fill_(state["odd"])


def micro_batches(batch_size: int, ranks: int, most: int) -> int:
    """The smallest number of equal parts such that a rank has at most `most` images at a time.

    1 for a batch that does not divide over the ranks, which the loader refuses.
    """
    share = batch_size // ranks
    if batch_size % ranks:
        return 1
    return next(parts for parts in range(1, share + 1) if share % parts == 0 and share // parts <= most)
