"""A sweep of linear classifiers in one pass over augmented images, as DINOv2's evaluation does (Oquab et al., 2023).

Thirteen learning rates, each with the features of the last stage of the backbone and with those of the last two, are
trained side by side by SGD with momentum and a cosine schedule, and the best is chosen. The batch is that of DINOv2's
eight GPUs; its 10 × 1,250 steps are ten epochs of ImageNet.

Shapes: N images, H heads, D feature dimension, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from unigrad_fast.evaluation.linear import FrozenEncoder, Judged
from unigrad_fast.evaluation.linear_training import Method, ProbeSchedule
from unigrad_fast.evaluation.samples import held_out
from unigrad_fast.pipelines.manifest import part
from unigrad_fast.runtime.errors import UserError

RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)  # per 256 images
STAGES = (1, 2)  # at the end of the backbone, whose pooled features a head takes
COUNT = len(STAGES) * len(RATES)
SCHEDULE = ProbeSchedule(epochs=10, batch_size=1024, base_lr=max(RATES))


class LastStages(nn.Module):
    """A backbone that maps images [N, 3, S, S] to the pooled features of its last stages, the last one's at the end."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        if not hasattr(backbone, "last_stages"):
            raise UserError("protocol = sweep: this backbone has no features of stages; use quick or paper")
        self.backbone = backbone

    def forward(self, images: Tensor) -> Tensor:
        return self.backbone.last_stages(images, max(STAGES))


class Heads(nn.Module):
    """For each number of `STAGES` and each of `RATES` a linear classifier, in this order.

    Args:
        widths: of the features that the heads of each number of stages take.
        dtype: of the products in training, with fp32 weights and sums; None is fp32, in which they are judged.
    """

    def __init__(self, widths: Sequence[int], classes: int, seed: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.widths, self.dtype = tuple(widths), dtype
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(classes, width, generator=generator) * 0.01 for width in widths]
        self.weights = nn.ParameterList(each.expand(len(RATES), -1, -1).clone() for each in drawn)
        self.biases = nn.ParameterList(torch.zeros(len(RATES), classes) for _ in widths)

    def forward(self, features: Tensor) -> Tensor:
        """Features of all stages [N, D] to logits [N, H, K]."""
        logits = []
        low = self.dtype is not None and torch.is_grad_enabled()
        with torch.autocast(features.device.type, self.dtype, enabled=low):
            for width, weight, bias in zip(self.widths, self.weights, self.biases, strict=True):
                product = linear(features[:, -width:], weight.flatten(0, 1), bias.flatten())
                logits.append(product.unflatten(1, bias.shape))
        return torch.cat(logits, dim=1).float()

    def head(self, number: int) -> nn.Linear:
        """One of them, which takes the features of its own stages."""
        stages, rate = divmod(number, len(RATES))
        weight, bias = self.weights[stages][rate], self.biases[stages][rate]
        classifier = nn.Linear(weight.shape[1], len(bias), device=weight.device)
        with torch.no_grad():
            classifier.weight.copy_(weight)
            classifier.bias.copy_(bias)
        return classifier


class _SGD(torch.optim.SGD):
    """torch's; unlike ours, it goes on if one head's gradient is not finite."""

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)  # the first step is the same
        return {"momentum": state["momentum_buffer"]}


class Sweep:
    """A sweep over the features of an encoder.

    Args:
        choose: images on which the best head is chosen: "val", as DINOv2's evaluation does, or "train", for a tenth of
            the training images that is held out.

    Attributes:
        encoder: with the images that the heads are trained on, and in place of validation images those of the choice.
    """

    def __init__(self, encoder: FrozenEncoder, choose: str) -> None:
        last_width = encoder.width()
        self.val, self.choose = encoder.val, choose
        encoder = replace(encoder, backbone=LastStages(encoder.backbone))
        self.encoder = without_held_out(encoder) if choose == "train" else encoder
        self.method = Method(
            lambda width, classes, seed: Heads([last_width, width], classes, seed, encoder.dtype),
            lambda parameters, lr: _SGD(parameters, lr=lr, momentum=0.9),
            kind="cosine",
            shares=tuple(rate / max(RATES) for rate in RATES) * len(STAGES),
        )

    def judge(self, heads: Heads, base_lr: float) -> Judged:
        """The head with the highest top-1 accuracy; of equals the one with fewer stages, then the lower rate.

        Args:
            base_lr: the largest of the rates.
        """
        found, images = self.encoder.judge_heads(heads, COUNT)
        best = max(range(COUNT), key=lambda number: found[number][0])
        described = [
            {"stages": stages, "base_lr": rate / max(RATES) * base_lr, "accuracy": top1, "top5": top5}
            for (stages, rate), (top1, top5) in zip(product(STAGES, RATES), found, strict=True)
        ]
        chosen_on = f"{images:,} validation images" if self.choose == "val" else f"{images:,} held-out training images"
        if self.choose == "train":
            found, images = replace(self.encoder, val=self.val).judge_heads(heads, COUNT)
        stages = described[best]["stages"]
        said = (
            f"best of {COUNT} classifiers, chosen on {chosen_on}: features of the last "
            f"{'stage' if stages == 1 else f'{stages} stages'}, rate {described[best]['base_lr']:g} per 256 images"
        )
        if described[best]["base_lr"] == base_lr:
            said += f"; this is the largest rate, so try --base_lr {10 * base_lr:g}"
        figures = {"chosen": described[best], "chosen_on": self.choose, "heads": described}
        return Judged(*found[best], images, heads.head(best), figures, said)


def without_held_out(encoder: FrozenEncoder) -> FrozenEncoder:
    """The encoder with nine tenths of each class's training images; the rest, drawn with the seed, are to choose on."""
    labels = np.asarray(encoder.train.labels)
    held = held_out(labels, encoder.config.seed)
    kept, chosen = (
        part(encoder.train, rows, labels[rows], encoder.train.classes)
        for rows in (np.flatnonzero(~held), np.flatnonzero(held))
    )
    return replace(encoder, train=kept, val=chosen)
