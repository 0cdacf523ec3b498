"""A ResNet with a quarter of the channels of ResNet-18 and fewer blocks, for tests of what no network changes.

`with thin():` makes the backbone named resnet18 thin in this process; `python -m thin ...` is `unigrad-fast ...` so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from unittest import mock

import torchvision
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

SHARE = 4


class ThinResNet(ResNet):
    def __init__(self, blocks: int, stages: int, **settings):
        super().__init__(BasicBlock, [blocks] * stages + [0] * (4 - stages), **settings)
        self.fc = nn.Linear(self.inplanes, settings.get("num_classes", 1000))
        self.__class__ = ResNet

    def _make_layer(self, block, planes, blocks, *arguments, **settings):
        if blocks == 0:
            return nn.Sequential()
        arguments = (blocks, *arguments)
        return super()._make_layer(block, planes // SHARE, *arguments, **settings)


def thin(blocks: int = 1, stages: int = 4) -> AbstractContextManager:
    """`blocks` in each of the first stages; ResNet-18 has 2 in 4, with which the names of all weights are its own.

    0 blocks leave the stem alone.
    """
    return mock.patch.object(torchvision.models, "resnet18", partial(ThinResNet, blocks, stages))


def smooth_(network: nn.Module) -> None:
    """SiLU takes the place of ReLU, whose kink turns rounding into jumps of the gradient."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.SiLU())


@contextmanager
def smoothed() -> Iterator[None]:
    """While inside, trainers are built with smooth encoders."""
    from unigrad_fast.training import trainer

    def build(*arguments, **settings) -> nn.Module:
        encoder = original(*arguments, **settings)
        smooth_(encoder)
        return encoder

    original = trainer.build_encoder
    with mock.patch.object(trainer, "build_encoder", build):
        yield


if __name__ == "__main__":
    from unigrad_fast.cli import main

    with thin():
        sys.exit(main())
