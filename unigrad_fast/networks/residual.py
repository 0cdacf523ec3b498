"""torchvision's residual networks with addition, ReLU and max-pool fused into the preceding batch norms.

Modules, names, parameters and results are torchvision's; only `forward` differs. On a GPU norm, addition and ReLU are
one kernel, and in training the stem's norm, ReLU and max-pool, and most blocks return a pair of equal tensors, one for
each branch of the next block; elsewhere they are the same operations as in torchvision.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from unigrad_fast.kernels.dispatch import use_triton
from unigrad_fast.networks.lockstep import Steps, alone, steps_of
from unigrad_fast.networks.norm_convolution import convolved, fuses

# A block's result; twice if its gradients from the next block's branches are to be added in its last norm.
Used: TypeAlias = "Tensor | tuple[Tensor, Tensor]"


def activated(activation: nn.Module, norm: nn.Module, x: Tensor, residual: Tensor | None = None, **use: bool):
    """activation(norm(x) + residual); the norm computes a ReLU itself, any other activation is applied after it.

    `use` says how the result is used, if the norm computes all of it (`GroupedBatchNorm.forward`).
    """
    if type(activation) is nn.ReLU:
        return norm(x, residual=residual, relu=True, **use)
    return activation(norm(x, residual=residual))


class Fused:
    """A residual block.

    Attributes:
        twice: whether the next block takes the result for both of its branches (`GroupedBatchNorm.forward`).
    """

    twice = False

    def forward(self, x: Used) -> Used:
        return alone(self.steps(x))

    def steps(self, x: Used) -> Steps:
        """The forward pass, pausing before each norm."""
        x, shortcut = x if isinstance(x, tuple) else (x, x)
        if self.downsample is not None:
            convolution, norm = self.downsample
            shortcut = convolved(convolution, norm, shortcut)
            yield norm, shortcut
            shortcut = norm(shortcut)
        layers = self.layers()
        for (convolution, norm), following in pairwise(layers):
            x = convolved(convolution, norm, x)
            yield norm, x
            x = activated(self.relu, norm, x, defer=fuses(*following, x))
        last, last_norm = layers[-1]
        x = convolved(last, last_norm, x)
        yield last_norm, x
        return activated(self.relu, last_norm, x, shortcut, twice=self.twice)


class FusedBasicBlock(Fused, BasicBlock):
    def layers(self) -> list[tuple[nn.Module, nn.Module]]:
        """Convolutions of the residual branch, each with its norm."""
        return [(self.conv1, self.bn1), (self.conv2, self.bn2)]


class FusedBottleneck(Fused, Bottleneck):
    def layers(self) -> list[tuple[nn.Module, nn.Module]]:
        """Convolutions of the residual branch, each with its norm."""
        return [(self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)]


class FusedResNet(ResNet):
    def _forward_impl(self, x: Tensor) -> Tensor:
        return alone(self.steps(x))

    def last_stages(self, x: Tensor, stages: int) -> Tensor:
        """Pooled features of the last stages, [N, D], the last one's at the end; in evaluation mode."""
        return alone(self.steps(x, stages))

    def steps(self, x: Tensor, stages: int = 1) -> Steps:
        """The forward pass, pausing before each norm; it returns the pooled features of the last stages."""
        x = self.conv1(x)
        yield self.bn1, x
        if use_triton(x.device) and type(self.maxpool) is nn.MaxPool2d and type(self.relu) is nn.ReLU:
            x = self.bn1(x, relu=True, pool=self.maxpool)
        else:
            x = self.maxpool(activated(self.relu, self.bn1, x))
        pooled = []
        for number, layer in enumerate((self.layer1, self.layer2, self.layer3, self.layer4)):
            for block in layer:
                x = yield from steps_of(block, x)
            if number >= 4 - stages:
                pooled.append(self.avgpool(x).flatten(1))
        return self.fc(torch.cat(pooled, dim=1) if stages > 1 else pooled[0])


class FusedProjector(nn.Sequential):
    """Linear layers, each except the first preceded by a norm and an activation.

    Attributes:
        contexts: if set, backward recomputes norms, activations and autocast's weight copies, one layer at a time; the
            input and the hidden layers' matrix products are kept, so none of those is computed twice. Returns the
            contexts of a pass and of its recomputation.
    """

    contexts: Callable[[], tuple[Any, Any]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        return alone(self.steps(x))

    def steps(self, x: Tensor) -> Steps:
        """The forward pass, pausing before each norm."""
        first, *rest = self
        x = self._part(first, x)
        for norm, *others in zip(*[iter(rest)] * 3, strict=True):
            yield norm, x
            x = self._part(partial(_layer, norm, *others), x)
        return x

    def _part(self, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.contexts is None or not torch.is_grad_enabled():
            return part(x)
        return checkpoint(part, x, use_reentrant=False, preserve_rng_state=False, context_fn=self.contexts)


def _layer(norm: nn.Module, activation: nn.Module, linear: nn.Module, x: Tensor) -> Tensor:
    return linear(activated(activation, norm, x))


FUSED = {BasicBlock: FusedBasicBlock, Bottleneck: FusedBottleneck, ResNet: FusedResNet}


def fuse(backbone: nn.Module, projector: nn.Sequential) -> None:
    """Fuse addition and activation into an encoder's norms, which `batch_norm.convert` has made."""
    for module in backbone.modules():
        module.__class__ = FUSED.get(type(module), type(module))
    blocks = [module for module in backbone.modules() if isinstance(module, Fused)]
    for block in blocks[:-1]:
        block.twice = True
    projector.__class__ = FusedProjector
