"""The matrix product is the convolution."""

import copy

import pytest
import torch
from torch import nn

from unigrad_fast.networks.small_convolution import MOST_PIXELS, SmallConv2d, use_small_convolutions


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (2, 2), (1, 2), (2, 1), (3, 3), (4, 4), (1, 4), (4, 3), (9, 5)])
def test_output_and_gradients_equal_the_convolutions(size, stride, bias):
    convolution = nn.Conv2d(5, 7, 3, stride, padding=1, bias=bias).double()
    small = use_small_convolutions(nn.Sequential(copy.deepcopy(convolution)))[0]
    images = torch.randn(3, 5, *size, dtype=torch.float64).to(memory_format=torch.channels_last)
    inputs = [images.clone().requires_grad_() for _ in range(2)]
    outputs = [module(x) for module, x in zip((convolution, small), inputs, strict=True)]
    torch.testing.assert_close(outputs[1], outputs[0])
    weights = torch.randn_like(outputs[0])
    for output in outputs:
        (output * weights).sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    torch.testing.assert_close(small.weight.grad, convolution.weight.grad)


def test_only_plain_three_by_three_convolutions_choose_and_keep_their_tensors():
    module = nn.ModuleList(
        [
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3),
            nn.Conv2d(4, 4, 1),
            nn.Conv2d(4, 4, 3, padding=1, groups=2),
            nn.Conv2d(4, 4, 3, padding=2, dilation=2),
        ]
    )
    before = dict(module.named_parameters())
    use_small_convolutions(module)
    assert [type(part) is SmallConv2d for part in module] == [True, False, False, False, False]
    assert all(tensor is before[name] for name, tensor in module.named_parameters())


def test_large_maps_take_the_library_bit_for_bit():
    convolution = nn.Conv2d(2, 3, 3, padding=1)
    small = use_small_convolutions(nn.Sequential(copy.deepcopy(convolution)))[0]
    images = torch.randn(1, 2, MOST_PIXELS + 1, 1)
    assert torch.equal(small(images), convolution(images))


def test_under_autocast_it_computes_in_bf16_and_keeps_channels_last():
    small = use_small_convolutions(nn.Sequential(nn.Conv2d(4, 6, 3, padding=1)))[0]
    images = torch.randn(5, 4, 2, 2).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        output = small(images)
    assert output.dtype == torch.bfloat16 and output.is_contiguous(memory_format=torch.channels_last)
