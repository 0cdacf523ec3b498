"""Names of the backbones, for `model.backbone`; `networks.backbones` builds them."""

from __future__ import annotations

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "wide_resnet50_2", "wide_resnet101_2")
BACKBONES = RESNETS
