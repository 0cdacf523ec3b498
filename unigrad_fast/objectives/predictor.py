"""The predictor network of BYOL and SimSiam, with batch statistics over all ranks.

Shape suffixes: V views, N images of this rank, H hidden channels, C embedding width.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast.objectives import ranks
from unigrad_fast.objectives.state import KeptState

EPSILON, MOMENTUM = 1e-5, 0.1  # torch's defaults for batch norm


class Predictor(nn.Module):
    """Linear, batch norm, ReLU, linear: as in SimSiam.

    Args:
        width: C.
        hidden: H.
    """

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.inner = nn.Linear(width, hidden, bias=False)
        self.norm = RankBatchNorm(hidden)
        self.outer = nn.Linear(hidden, width)

    def forward(self, view_VNC: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        """Predictions [V, N, C]; each view uses its own batch statistics."""
        if not torch.is_autocast_enabled(view_VNC.device.type):  # autocast converts by itself
            view_VNC = view_VNC.to(self.inner.weight.dtype)
        return self.outer(torch.relu(self.norm(self.inner(view_VNC), group)))


class RankBatchNorm(KeptState):
    """Batch norm of [V, N, H] over the images of all ranks, view by view; running statistics are kept state.

    Args:
        channels: H.
    """

    kept = ("running_mean", "running_var")
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        with torch.inference_mode(False):
            self.running_mean, self.running_var = torch.zeros(channels), torch.ones(channels)

    def forward(self, x_VNH: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        exact = torch.promote_types(x_VNH.dtype, torch.float32)
        x = x_VNH.to(exact)
        if self.training:
            x, mean_VH, variance_VH, count = standardised(x, ranks.size(group) > 1, group)
            with torch.no_grad():
                unbiased_VH = variance_VH * (count / (count - 1).clamp_min(1))
                for mean_H, variance_H in zip(mean_VH, unbiased_VH, strict=True):
                    self.running_mean.lerp_(mean_H.to(self.running_mean.dtype), MOMENTUM)
                    self.running_var.lerp_(variance_H.to(self.running_var.dtype), MOMENTUM)
        else:
            x = (x - self.running_mean) * (self.running_var + EPSILON).rsqrt()
        return (x * self.weight + self.bias).to(x_VNH.dtype)


def standardised(
    x_VNC: Tensor, over_ranks: bool, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x − mean) / √(var + 1e-5), view by view; differentiable.

    Args:
        x_VNC: this rank's rows.
        over_ranks: whether to compute the statistics over all ranks.

    Returns:
        The standardised rows [V, N, C], and without gradient the mean [V, C], the biased variance [V, C] and the number
        of images.
    """
    images = x_VNC.new_full((), x_VNC.shape[1])
    if not over_ranks and x_VNC.shape[1]:  # torch's own function takes one pass
        parts = [torch.native_batch_norm(view, None, None, None, None, True, 0.0, EPSILON) for view in x_VNC]
        normal_VNC, mean_VC, inverse_VC = (torch.stack(part) for part in zip(*parts, strict=True))
        variance_VC = inverse_VC.detach().square().reciprocal().sub_(EPSILON).clamp_min_(0)
        return normal_VNC, mean_VC.detach(), variance_VC, images
    if over_ranks:
        sums_VC = nn.functional.pad(x_VNC.sum(1), (0, 1), value=float(x_VNC.shape[1]))
        sums_VC = ranks.sum_over_ranks(sums_VC, group)
        images, sums_VC = sums_VC[0, -1].detach(), sums_VC[:, :-1]
    else:
        sums_VC = x_VNC.sum(1)
    images = images.clamp_min(1)
    mean_VC = sums_VC / images
    centred_VNC = x_VNC - mean_VC.unsqueeze(1)
    squares_VC = centred_VNC.square().sum(1)
    variance_VC = (ranks.sum_over_ranks(squares_VC, group) if over_ranks else squares_VC) / images
    normal_VNC = centred_VNC * (variance_VC + EPSILON).rsqrt().unsqueeze(1)
    return normal_VNC, mean_VC.detach(), variance_VC.detach(), images
