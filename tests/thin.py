"""ResNet-18 with a quarter of its channels, for tests of what does not depend on the network: a sixteenth of the work.

`with thin():` makes the backbone named resnet18 thin in this process; `python -m thin ...` is `unigrad-fast ...` so.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from unittest import mock

import torchvision
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

SHARE = 4


class ThinResNet(ResNet):
    def __init__(self, **settings):
        super().__init__(BasicBlock, [1, 1, 1, 1], **settings)
        self.fc = nn.Linear(512 // SHARE, 1000)

    def _make_layer(self, block, planes, *arguments, **settings):
        return super()._make_layer(block, planes // SHARE, *arguments, **settings)


def thin() -> AbstractContextManager:
    return mock.patch.object(torchvision.models, "resnet18", ThinResNet)


if __name__ == "__main__":
    from unigrad_fast.cli import main

    with thin():
        sys.exit(main())
