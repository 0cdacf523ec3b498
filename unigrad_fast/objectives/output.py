"""What an objective returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from unigrad_fast.pipelines.shortened import Shortened
from unigrad_fast.runtime.torch_private import register_pytree_node

TERMS = ("objective", "positive_cosine", "negative_term", "surrogate")  # metrics of gradient forms
TENSORS = ("loss", "metrics", "nonfinite", "unit")


@dataclass(eq=False, repr=False)
class ObjectiveOutput(Shortened):
    """What an objective returns; no two of its tensors share memory.

    Attributes:
        loss: scalar, the mean over this rank's images; call `backward` on it.
        metrics: detached scalars on the device, over this rank's images.
        nonfinite: floating scalar on the device: 1 if an embedding of either branch is NaN or infinite, else 0. If it
            is 1, drop the step: the loss leaves those rows out. In training it covers all ranks and is the same on all
            of them; in evaluation mode it covers this rank.
        unit: [2·N, C] unit embeddings of the online branch's global views, detached.
        over_ranks: whether the ranks of `process_group` share one batch, as in training.
        process_group: None is the default group.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    nonfinite: Tensor
    unit: Tensor
    over_ranks: bool = False
    process_group: dist.ProcessGroup | None = None

    @torch.no_grad()
    def feature_std(self) -> Tensor:
        """Mean standard deviation per channel of the unit embeddings times √C, over the images of all ranks.

        1 for a uniform distribution on the sphere, 0 at collapse; a detached scalar. It is not a metric because it
        reads all embeddings once more, and with `over_ranks` it is a collective that all ranks must call. After a call
        in evaluation mode it covers this rank's images.
        """
        unit_VNC = self.unit.unflatten(0, (2, -1))
        images, width = unit_VNC.shape[1:]
        mean_VC = square_VC = unit_VNC.new_zeros(2, width, dtype=torch.float64)
        if images:
            square_VC, mean_VC = torch.var_mean(unit_VNC.double(), dim=1, correction=0)
        if self.over_ranks:
            # E[x²] − E[x]² over ranks: in float64 it is accurate to 1e-8 of the mean.
            count = torch.full_like(mean_VC[:, :1], images)
            sums = torch.cat([count, images * mean_VC, images * (square_VC + mean_VC.square())], dim=1)
            dist.all_reduce(sums, group=self.process_group)
            sums = sums / sums[:, :1]
            mean_VC, square_VC = sums[:, 1:].chunk(2, dim=1)
            square_VC = (square_VC - mean_VC.square()).clamp_min(0)
        std = square_VC.sqrt().mean() * width**0.5
        return std.to(torch.promote_types(self.unit.dtype, torch.float32))


# Model wrappers (FSDP, DDP) look for tensors in the output of forward.
register_pytree_node(
    ObjectiveOutput,
    lambda output: ([getattr(output, name) for name in TENSORS], (output.over_ranks, output.process_group)),
    lambda tensors, ranks: ObjectiveOutput(*tensors, *ranks),
)
