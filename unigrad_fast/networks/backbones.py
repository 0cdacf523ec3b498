"""Builders of the backbones named in `recipes.backbones`.

Shape suffixes: N images, H and W pixels, D feature dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import torchvision
from torch import nn

from unigrad_fast.recipes.backbones import RESNETS


def build_backbone(name: str, stem: str = "imagenet") -> nn.Module:
    """A backbone without a classifier.

    Args:
        name: a key of BUILDERS.
        stem: "imagenet", or "small", which is usual for images of 32 to 64 pixels.

    Returns:
        A module that maps [N, 3, H, W] to features [N, D]; D is its attribute `feature_dim`.
    """
    return BUILDERS[name](name, stem)


def resnet(name: str, stem: str) -> nn.Module:
    """A torchvision ResNet.

    The last batch norm of each residual branch starts at zero, as is usual for large batches (Goyal et al., 2017,
    section 5.1). The "imagenet" stem is a 7×7 convolution with stride 2 and a max-pool, "small" a 3×3 convolution with
    stride 1 and no pooling. With the "imagenet" stem the state dict loads strictly into torchvision's model with `fc`
    replaced by `nn.Identity`.
    """
    backbone = getattr(torchvision.models, name)(zero_init_residual=True)
    backbone.feature_dim = backbone.fc.in_features
    backbone.fc = nn.Identity()
    if stem == "small":
        backbone.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
        nn.init.kaiming_normal_(backbone.conv1.weight, mode="fan_out", nonlinearity="relu")
        backbone.maxpool = nn.Identity()
    return backbone


BUILDERS: dict[str, Callable[[str, str], nn.Module]] = dict.fromkeys(RESNETS, resnet)
