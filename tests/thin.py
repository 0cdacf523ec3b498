"""A ResNet with a quarter of the channels of ResNet-18 and fewer blocks, for tests of what no network changes.

`with thin():` makes the backbone named resnet18 thin in this process; `python -m thin ...` is `unigrad-fast ...` so.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from functools import partial
from unittest import mock

import torchvision
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

SHARE = 4


class ThinResNet(ResNet):
    def __init__(self, blocks: int, **settings):
        super().__init__(BasicBlock, [blocks] * 4, **settings)
        self.fc = nn.Linear(self.inplanes, settings.get("num_classes", 1000))
        self.__class__ = ResNet

    def _make_layer(self, block, planes, blocks, *arguments, **settings):
        if blocks == 0:
            return nn.Sequential()
        arguments = (blocks, *arguments)
        return super()._make_layer(block, planes // SHARE, *arguments, **settings)


def thin(blocks: int = 1) -> AbstractContextManager:
    """`blocks` in each of the four stages; ResNet-18 has 2, with which the names of all weights are its own.

    0 leaves the stem alone.
    """
    return mock.patch.object(torchvision.models, "resnet18", partial(ThinResNet, blocks))


if __name__ == "__main__":
    from unigrad_fast.cli import main

    with thin():
        sys.exit(main())
