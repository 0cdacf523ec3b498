"""torchvision's residual networks with addition and ReLU inside the batch norms that precede them.

Modules, names, parameters and results are torchvision's; only `forward` differs. On a GPU a norm, the addition and the
ReLU are one kernel; elsewhere they are what torchvision does.
"""

from __future__ import annotations

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet


class FusedBasicBlock(BasicBlock):
    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.bn1(self.conv1(x), relu=True)
        return self.bn2(self.conv2(y), residual=shortcut, relu=True)


class FusedBottleneck(Bottleneck):
    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.bn1(self.conv1(x), relu=True)
        y = self.bn2(self.conv2(y), relu=True)
        return self.bn3(self.conv3(y), residual=shortcut, relu=True)


class FusedResNet(ResNet):
    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.bn1(self.conv1(x), relu=True))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


class FusedProjector(nn.Sequential):
    """Linear layers, norms and ReLUs."""

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self)
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            if isinstance(layer, nn.ReLU):
                continue
            x = layer(x, relu=True) if isinstance(following, nn.ReLU) else layer(x)
        return x


FUSED = {BasicBlock: FusedBasicBlock, Bottleneck: FusedBottleneck, ResNet: FusedResNet}


def fuse(backbone: nn.Module, projector: nn.Sequential) -> None:
    """Have the norms of an encoder, which `batch_norm.convert` has made, do what follows them."""
    for module in backbone.modules():
        module.__class__ = FUSED.get(type(module), type(module))
    projector.__class__ = FusedProjector
