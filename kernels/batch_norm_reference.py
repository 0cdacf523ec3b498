"""Batch norm of several groups of images in plain torch: the ground truth, and the path on the CPU.

With x_r the n_r rows of rank r (images, or image positions), per channel and group:

    forward    μ, M₂ of all rows from the ranks' (n_r, μ_r, M₂_r), merged as in Chan, Golub and LeVeque (1979)
               y = x̂·γ + β,  x̂ = (x − μ) / σ,  σ² = M₂ / n + ε;  then optionally + residual, and ReLU
    backward   dx = γ/σ · (dy' − Σdy' / n − x̂ · Σ(dy'·x̂) / n)        sums over all ranks' rows
               dγ = Σ dy'·x̂,  dβ = Σ dy'                            sums over this rank's rows, as usual

dy' is dy where the ReLU's input was above zero, and 0 elsewhere. Groups have equal sizes and are consecutive along the
first dimension.

Shape suffixes: G groups, R ranks, C channels, S = 2C + 1 statistics.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements per block of the statistics: a block stays in the cache while it is read three times, and fp32 sums over its
# rows lose little precision. torch.batch_norm sums all rows of channels-last input at once: for 65,536 rows with mean
# 1e4 and standard deviation 1 its variance in fp32 is 9 times too large.
BLOCK_ELEMENTS = 1 << 17
WORD = 32  # bits per word of the ReLU's mask
NOWHERE = 9  # the choice of a window without a number above zero

_fixed_backward = torch.ops.aten.native_batch_norm_backward


def statistics(x: Tensor, groups: int) -> Tensor:
    """Number of rows, mean and sum of squared deviations on this rank, per group and channel.

    Args:
        x: [N, C, ...], contiguous or channels-last; N is a multiple of `groups` and may be 0.

    Returns:
        [G, S] float64: the mean of each channel, then its squared deviations, and the number of rows.
    """
    if not x.numel():
        return x.new_zeros(groups, 2 * x.shape[1] + 1, dtype=torch.float64)
    return torch.stack([_statistics(part) for part in x.chunk(groups)])


def _statistics(x: Tensor) -> Tensor:
    channels = x.shape[1]
    unit_C = torch.ones(channels, dtype=torch.promote_types(x.dtype, torch.float32))
    blocks = x.split(max(1, BLOCK_ELEMENTS // x[0].numel()))
    ones = torch.ones_like(blocks[0])
    parts = []
    for block in blocks:
        # The running buffers are not used; passing them makes the results fp32 for bf16 input.
        mean_C, variance_C = torch.batch_norm_update_stats(block, unit_C.clone(), unit_C.clone(), 0.0)
        # Σ (x − mean), the rounding error of the mean: it is the weight's gradient for an output gradient of 1.
        _, rest_C, _ = _fixed_backward(
            ones[: len(block)], block, unit_C, mean_C, unit_C, None, None, False, 0.0, [False, True, False]
        )
        rows = block.numel() // channels
        rest_C = rest_C.double() / rows
        squares_C = rows * (variance_C.double() - rest_C.square()).clamp_min(0)
        parts.append(torch.cat([mean_C.double() + rest_C, squares_C, rest_C.new_full((1,), rows)]))
    return torch.cat(merge(torch.stack(parts)))


def merge(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics of the union of disjoint sets of rows (Chan, Golub and LeVeque, 1979).

    Args:
        parts: [R, ..., S] float64, the statistics of each set; not all sets may be empty.

    Returns:
        mean and squares [..., C], and count [..., 1].
    """
    channels = parts.shape[-1] // 2
    mean_RC, squares_RC, count_R1 = parts.split([channels, channels, 1], dim=-1)
    count_1 = count_R1.sum(0)
    mean_C = (count_R1 * mean_RC).sum(0) / count_1
    squares_C = squares_RC.sum(0) + (count_R1 * (mean_RC - mean_C).square()).sum(0)
    return mean_C, squares_C, count_1


def settle(
    parts_RGS: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    tracked: Tensor | None,
    momentum: float | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics over all ranks; also updates the running buffers with each group in turn.

    Args:
        parts_RGS: float64, the result of `statistics` on each rank.
        running_mean, running_var: [C], updated in place; None if there are none.
        tracked: int64 scalar, the number of batches that the running buffers cover; incremented here for each group.
        momentum: weight of the new statistics in the running buffers; None averages over all batches.
        dtype: dtype of the results.

    Returns:
        Mean and biased variance [G, C], and the number of rows [G] in float64.
    """
    mean_GC, squares_GC, count_G1 = merge(parts_RGS)
    for mean_C, squares_C, count_1 in zip(mean_GC, squares_GC, count_G1, strict=True):
        if tracked is not None:
            tracked.add_(1)
        if running_mean is None or running_var is None:
            continue
        share = 1.0 / float(tracked) if momentum is None else momentum
        variance_C = squares_C / (count_1 - 1)
        running_mean.mul_(1 - share).add_(mean_C.to(running_mean.dtype), alpha=share)
        running_var.mul_(1 - share).add_(variance_C.to(running_var.dtype), alpha=share)
    return mean_GC.to(dtype), (squares_GC / count_G1).to(dtype), count_G1.flatten()


def normalise(
    x: Tensor,
    mean_GC: Tensor,
    variance_GC: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    relu: bool,
    keep_mask: bool,
) -> tuple[Tensor, Tensor]:
    """y = relu(x̂·γ + β + residual), in x's dtype and memory format.

    Args:
        x: [N, C, ...], contiguous or channels-last.
        mean_GC, variance_GC: statistics of each group.
        weight, bias: γ and β [C].
        residual: shaped like x.
        relu: whether to apply the ReLU.
        keep_mask: whether to return the mask of the elements that passed the ReLU.

    Returns:
        y, and with `keep_mask` int32 [rows, ⌈C/32⌉]: bit c of a row (an image position, channels-last) is set if the
        ReLU's input in channel c was above zero.
    """
    dtype = mean_GC.dtype
    weight, bias = (None if p is None else p.to(dtype) for p in (weight, bias))
    y = _per_group(x, lambda part, g: _fixed(part, mean_GC[g], variance_GC[g], weight, bias, eps), len(mean_GC))
    if residual is not None:
        y += residual
    mask = _packed(y > 0) if keep_mask else empty_mask(x, keep_mask)
    return (torch.relu_(y) if relu else y), mask


def normalise_(
    x: Tensor,
    mean_GC: Tensor,
    variance_GC: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    relu: bool,
) -> None:
    """`normalise`, overwriting x."""
    x.copy_(normalise(x, mean_GC, variance_GC, weight, bias, residual, eps, relu, keep_mask=False)[0])


def pool(
    x: Tensor,
    mean_GC: Tensor,
    variance_GC: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    keep_choice: bool,
) -> tuple[Tensor, Tensor]:
    """The maximum of relu(x̂·γ + β) over windows of 3 × 3 with stride 2 and a padding of 1.

    Args:
        x: [N, C, H, W], channels-last; the other arguments as in `normalise`.
        keep_choice: whether to return which position of each window was chosen.

    Returns:
        y [N, C, ⌈H/2⌉, ⌈W/2⌉], and with `keep_choice` for each of its elements, as uint8, the number of the position in
        its window, row by row; `NOWHERE` if the maximum is not above zero.
    """
    y, _ = normalise(x, mean_GC, variance_GC, weight, bias, None, eps, relu=True, keep_mask=False)
    y, index = F.max_pool2d(y, 3, stride=2, padding=1, return_indices=True)
    if not keep_choice:
        return y, x.new_empty(0, dtype=torch.uint8)
    width = x.shape[3]
    corner_H, corner_W = (2 * torch.arange(size) - 1 for size in y.shape[2:])
    choice = (index // width - corner_H[:, None]) * 3 + index % width - corner_W
    return y, torch.where(y > 0, choice, NOWHERE).to(torch.uint8)


def norm_product(
    x: Tensor,
    matrix_CK: Tensor,
    groups: int,
    mean_GK: Tensor | None,
    variance_GK: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """A convolution of 1 × 1 of x, or of relu(x̂·γ + β), and the statistics of its result.

    Args:
        x: [N, K, H, W], channels-last.
        matrix_CK: the convolution's weight, in x's dtype.
        groups: as in `statistics`.
        mean_GK, variance_GK, weight, bias, eps: as in `normalise`; without a mean x is not normalised.

    Returns:
        y [N, C, H, W] in x's dtype, channels-last, and its statistics [G, S].
    """
    if mean_GK is not None and variance_GK is not None:
        x, _ = normalise(x, mean_GK, variance_GK, weight, bias, None, eps, relu=True, keep_mask=False)
    y = F.conv2d(x, matrix_CK[:, :, None, None]).contiguous(memory_format=torch.channels_last)
    return y, statistics(y, groups)


def pooled_size(x: Tensor) -> list[int]:
    """Height and width after `pool`."""
    return [(size + 1) // 2 for size in x.shape[2:]]


def _unpooled(dy: Tensor, choice: Tensor, x: Tensor) -> Tensor:
    """Gradient of `pool` with respect to x̂·γ + β."""
    height, width = dy.shape[2:]
    padded = F.pad(torch.zeros_like(x, dtype=dy.dtype), (1, 1, 1, 1))
    for position in range(9):
        down, right = divmod(position, 3)
        window = padded[:, :, down : down + 2 * height : 2, right : right + 2 * width : 2]
        window += torch.where(choice == position, dy, 0)
    return padded[:, :, 1:-1, 1:-1].contiguous(memory_format=torch.channels_last)


def empty_mask(x: Tensor, keep_mask: bool) -> Tensor:
    """Memory for the ReLU's mask; without `keep_mask` a tensor without elements."""
    channels = x.shape[1]
    shape = (x.numel() // channels, -(-channels // WORD)) if keep_mask else (0,)
    return x.new_empty(shape, dtype=torch.int32)


def is_dense(x: Tensor) -> bool:
    """Whether x is stored as consecutive rows of channels."""
    return x.is_contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.is_contiguous()


def _fixed(
    x: Tensor, mean_C: Tensor, variance_C: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Batch norm with given statistics.

    As `F.batch_norm`, whose check of eps refuses 0 in some versions of torch.
    """
    return torch.batch_norm(x, weight, bias, mean_C, variance_C, False, 0.0, eps, torch.backends.cudnn.enabled)


def _per_group(x: Tensor, work, groups: int) -> Tensor:
    """The results of `work` for all groups, in one tensor in x's memory format."""
    if groups == 1:
        return work(x, 0)
    y = torch.empty_like(x)
    for group, (part, out) in enumerate(zip(x.chunk(groups), y.chunk(groups), strict=True)):
        out.copy_(work(part, group))
    return y


def _rows(x: Tensor) -> Tensor:
    """[N, C, ...] as [rows, C]."""
    return x.movedim(1, -1).reshape(-1, x.shape[1])


def _packed(flags: Tensor) -> Tensor:
    flags_RC = _rows(flags).to(torch.int64)
    words = -(-flags_RC.shape[1] // WORD)
    flags_RWB = F.pad(flags_RC, (0, words * WORD - flags_RC.shape[1])).unflatten(1, (words, WORD))
    bits = (flags_RWB << torch.arange(WORD)).sum(-1)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)


def _unpacked(mask: Tensor, like: Tensor) -> Tensor:
    """The mask as booleans in the shape of `like`."""
    flags_RWB = (mask.to(torch.int64).unsqueeze(-1) >> torch.arange(WORD)) & 1
    flags_RC = flags_RWB.flatten(1)[:, : like.shape[1]].bool()
    return flags_RC.view(like.shape[0], *like.shape[2:], like.shape[1]).movedim(-1, 1)


def _let_through(dy, x, mean_GC, variance_GC, weight, bias, mask, *, eps: float, relu: bool) -> Tensor:
    if not relu:
        return dy
    if mask is None:
        y, _ = normalise(
            x.to(mean_GC.dtype), mean_GC, variance_GC, weight, bias, None, eps=eps, relu=False, keep_mask=False
        )
        return torch.where(y > 0, dy, 0)
    return torch.where(_unpacked(mask, dy), dy, 0)


def sums(
    dy: Tensor,
    x: Tensor,
    mean_GC: Tensor,
    variance_GC: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    eps: float,
    relu: bool,
    second: Tensor | None = None,
    keep: bool = False,
    choice: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ dy' and Σ dy'·x̂ on this rank, and the gradients of the parameters.

    Args:
        dy: shaped and laid out like x.
        x, mean_GC, variance_GC, weight, bias, eps, relu: as in `normalise`.
        mask: the mask that `normalise` returned; None if it can be recomputed from x, or without ReLU.
        second: gradient of a second use of y, which is added to dy.
        keep: whether to return dy', which is also the residual's gradient.
        choice: what `pool` returned, if y is its result; then without `relu` or `mask`.

    Returns:
        [G, 2, C] float64, dγ and dβ [2, C], and dy'; without `keep` a tensor without elements instead.
    """
    dtype, given = mean_GC.dtype, dy
    if choice is not None:
        dy = _unpooled(dy, choice, x)
    if second is not None:
        dy = dy + second
    sums_G2C = torch.zeros(len(mean_GC), 2, x.shape[1], dtype=torch.float64)
    if x.numel():
        dy = _let_through(dy, x, mean_GC, variance_GC, weight, bias, mask, eps=eps, relu=relu)
        unit_C = torch.ones_like(mean_GC[0])
        for group, (dy_part, x_part) in enumerate(zip(dy.chunk(len(mean_GC)), x.chunk(len(mean_GC)), strict=True)):
            # With fixed statistics the gradients of weight and bias are exactly Σ dy·x̂ and Σ dy.
            _, product_C, sum_C = _fixed_backward(
                dy_part, x_part, unit_C, mean_GC[group], variance_GC[group], None, None, False, eps, [False, True, True]
            )
            sums_G2C[group] = torch.stack([sum_C, product_C])
    if not keep:
        dy = x.new_empty(0)
    elif dy is given:
        dy = dy.clone()  # an operator must not return one of its inputs
    return sums_G2C, sums_G2C.sum(0).flip(0).to(dtype), dy


def gradient(
    dy: Tensor,
    x: Tensor,
    mean_GC: Tensor,
    variance_GC: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    sums_G2C: Tensor,
    count_G: Tensor,
    eps: float,
    relu: bool,
    choice: Tensor | None = None,
) -> Tensor:
    """dx.

    Args:
        dy: as in `sums`, which masks it if the ReLU's mask is not recomputed from x.
        x, mean_GC, variance_GC, weight, bias, eps: as in `sums`.
        sums_G2C: the sums that `sums` returns, added up over all ranks.
        count_G: number of rows over all ranks, as `settle` returns it.
        relu: whether to set dy to 0 where the ReLU's input, recomputed from x, was not above zero.
        choice: as in `sums`.
    """
    if choice is not None:
        dy = _unpooled(dy, choice, x)
    dy = _let_through(dy, x, mean_GC, variance_GC, weight, bias, None, eps=eps, relu=relu)
    dtype = mean_GC.dtype
    dy_mean_GC, product_mean_GC = (sums_G2C / count_G[:, None, None]).to(dtype).unbind(1)
    scale_GC = torch.rsqrt(variance_GC + eps) * (1 if weight is None else weight.to(dtype))
    zero_C, unit_C = torch.zeros_like(mean_GC[0]), torch.ones_like(mean_GC[0])

    # Both terms have the form of a batch norm with fixed statistics, so each is one fused pass.
    def of_dy(part: Tensor, g: int) -> Tensor:
        return _fixed(part, zero_C, unit_C, scale_GC[g], -scale_GC[g] * dy_mean_GC[g], eps=0.0)

    def of_x(part: Tensor, g: int) -> Tensor:
        return _fixed(part, mean_GC[g], variance_GC[g], -scale_GC[g] * product_mean_GC[g], zero_C, eps)

    dx = _per_group(dy, of_dy, len(mean_GC))
    for group, (part, out) in enumerate(zip(x.chunk(len(mean_GC)), dx.chunk(len(mean_GC)), strict=True)):
        out += of_x(part, group)
    return dx
