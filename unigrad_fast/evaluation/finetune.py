"""Fine-tuning: a backbone and a classifier on top are trained together on few labelled images.

Batch norm is in training mode, with statistics over all ranks, of the same images on any number of them. Weights,
momentum and gradients are fp32. Weights are whole on every rank; at the run's ZeRO stage 1 momentum is shared among the
ranks, at stage 2 also the gradients (see `optimization.owners`). The backbone computes channels-last and in the run's
precision, the classifier in fp32.

Shapes: N images, D feature dimension, K classes.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unigrad_fast.evaluation import crop_training
from unigrad_fast.evaluation.crop_training import CropTraining, Saved
from unigrad_fast.evaluation.finetune_protocols import Settings
from unigrad_fast.evaluation.linear import FrozenEncoder
from unigrad_fast.evaluation.linear_paper import new_classifier
from unigrad_fast.networks.batch_norm import convert
from unigrad_fast.optimization.lars import LARS
from unigrad_fast.optimization.loss_scale import LossScale
from unigrad_fast.optimization.sgd import SGD
from unigrad_fast.pipelines import Batch
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.precision import fastest_convolutions
from unigrad_fast.runtime.preemption import Preemption
from unigrad_fast.runtime.wording import count

OPTIMIZERS = {"sgd": SGD, "lars": LARS}


class Network(nn.Module):
    """A copy of an encoder's backbone with a new classifier, in training mode: images [N, 3, S, S] → logits [N, K]."""

    def __init__(self, encoder: FrozenEncoder) -> None:
        super().__init__()
        self.backbone = copy.deepcopy(encoder.backbone).to(memory_format=torch.channels_last)
        convert(self.backbone)
        classifier = new_classifier(encoder.width(), len(encoder.train.classes), encoder.config.seed)
        self.classifier = classifier.to(encoder.world.device)
        self.autocast = torch.autocast(encoder.world.device.type, encoder.dtype, enabled=encoder.dtype is not None)
        self.train().requires_grad_()

    def forward(self, images: Tensor) -> Tensor:
        with self.autocast:
            features = self.backbone(images.contiguous(memory_format=torch.channels_last))
        return self.classifier(features.float())

    def named_weights(self) -> dict[str, Tensor]:
        """Weights and statistics under torchvision's names, on the CPU; the classifier is `fc`."""
        fc = {f"fc.{name}": tensor for name, tensor in self.classifier.state_dict().items()}
        return {name: tensor.cpu().contiguous() for name, tensor in {**self.backbone.state_dict(), **fc}.items()}


class FineTuning(CropTraining):
    """The fine-tuning of a network."""

    name = "the network"

    def __init__(self, encoder: FrozenEncoder, settings: Settings, batch_size: int, steps_per_epoch: int) -> None:
        self.settings = settings
        network = Network(encoder)
        optimizer = OPTIMIZERS[settings.optimizer](_groups(network, settings), lr=0.0, momentum=0.9)
        self.loss_scale = LossScale(encoder.world.device) if encoder.dtype == torch.float16 else None
        optimizer.loss_scale = self.loss_scale
        super().__init__(encoder, network, optimizer, batch_size, settings.epochs, steps_per_epoch)

    @property
    def remedy(self) -> str:
        return f"lower backbone_lr = {self.settings.backbone_lr:g} and head_lr = {self.settings.head_lr:g}"

    def logits(self, batch: Batch) -> Tensor:
        return self.network(batch.views[0].to(self.encoder.world.device))

    def backward(self, loss: Tensor) -> None:
        super().backward(loss if self.loss_scale is None else loss * self.loss_scale.value)

    def set_rates(self) -> None:
        share = self.settings.share(self.steps_done, self.steps_per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = share * group["largest_lr"]

    def rates_shown(self, head: int) -> str:
        first, *_, last = (group["lr"] for group in self.optimizer.param_groups)
        return f"{first:.2e} and {last:.2e}"

    def step(self) -> None:
        super().step()
        if self.loss_scale is not None:
            self.loss_scale.update(self.optimizer.nonfinite)

    def _tensors(self) -> list[tuple[str, Tensor]]:
        scale = self.loss_scale
        scales = [] if scale is None else [("loss_scale", scale.value), ("good_steps", scale.good_steps)]
        return [*super()._tensors(), *scales]


def _groups(network: Network, settings: Settings) -> list[dict[str, Any]]:
    """The backbone's convolutions, its norms, and the classifier; only the first have rates that LARS adapts."""
    backbone = list(network.backbone.parameters())
    groups = [
        ([weight for weight in backbone if weight.dim() > 1], settings.backbone_lr, True),
        ([weight for weight in backbone if weight.dim() == 1], settings.backbone_lr, False),
        (list(network.classifier.parameters()), settings.head_lr, False),
    ]
    adapted = settings.optimizer == "lars"
    return [
        {"params": weights, "largest_lr": lr, **({"adapt": adapt} if adapted else {})} for weights, lr, adapt in groups
    ]


def fitted(batch_size: int, images: int, ranks: int, most: int) -> tuple[int, int]:
    """Images per step over all ranks, at most as many as there are, and micro-batches of a step.

    The micro-batches, whose images batch norm has statistics of, depend on the ranks only if there are too few images.

    Args:
        most: images of a micro-batch over all ranks.

    Raises UserError if a batch does not divide, or there are fewer images than ranks.
    """
    chosen = min(batch_size, images)
    parts = -(-chosen // most)
    if parts * ranks > chosen:
        raise UserError(f"{count(chosen, 'image')} per step for {ranks:,} ranks; use at most {chosen // parts}")
    largest = chosen // (parts * ranks) * parts * ranks
    if largest < chosen == batch_size:
        over = f"{ranks:,} ranks" + (f", {parts} parts of at most {most} images each" if parts > 1 else "")
        raise UserError(f"batch_size = {batch_size}: does not divide over {over}; give --batch_size {largest}")
    return largest, parts


def fine_tune(
    encoder: FrozenEncoder,
    settings: Settings,
    unfinished: Saved | None = None,
    preemption: Preemption | None = None,
) -> Network:
    """A network, fine-tuned on the training images of an encoder; all ranks call this together.

    Args:
        encoder: its backbone is not changed; its seed is that of the classifier, of the order and of the crops.
        settings: with rates.
        unfinished: progress of an interrupted training, and of this one; None saves nothing.
        preemption: tells when to stop.

    Raises:
        UserError: the batch does not divide over the ranks.
        DataError: too many images in a row cannot be read.
        RunStopped: the loss is not finite, or too many images cannot be used.
        Preempted: after saving.
    """
    most = encoder.config.evaluation.batch_size
    batch_size, parts = fitted(settings.batch_size, len(encoder.train), encoder.world.size, most)
    begin = partial(FineTuning, encoder, settings, batch_size)
    with fastest_convolutions(encoder.world.device):
        return crop_training.run(encoder, batch_size, parts, begin, unfinished, preemption).network


def judge(encoder: FrozenEncoder, network: Network) -> tuple[float, float | None, int]:
    """Accuracy of a fine-tuned network on the validation images, as `FrozenEncoder.judge`."""
    return replace(encoder, backbone=network.backbone).judge(network.classifier)
