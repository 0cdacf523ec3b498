"""What an objective returns."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from unigrad_fast.objectives.figures import Sums, finished, of_spread, over_ranks
from unigrad_fast.pipelines.shortened import Shortened
from unigrad_fast.runtime.torch_private import register_pytree_node

TERMS = ("objective", "positive_cosine", "negative_term", "surrogate")  # metrics of gradient forms
TENSORS = ("loss", "metrics", "nonfinite", "unit", "sums")


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
        sums: what `figures` needs besides `unit`, over this rank's images; empty unless the objective `measures`.
        over_ranks: whether the ranks of `process_group` share one batch, as in training.
        process_group: None is the default group.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    nonfinite: Tensor
    unit: Tensor
    sums: Sums = field(default_factory=dict)
    over_ranks: bool = False
    process_group: dist.ProcessGroup | None = None

    def feature_std(self) -> Tensor:
        """Mean standard deviation per channel of the unit embeddings times √C, over the images of all ranks.

        1 for a uniform distribution on the sphere, 0 at collapse; a detached scalar. It is not a metric because it
        reads all embeddings once more, and with `over_ranks` it is a collective that all ranks must call. After a call
        in evaluation mode it covers this rank's images.
        """
        return self._over_batch({})["feature_std"]

    def figures(self) -> dict[str, Tensor]:
        """`feature_std` and, if the objective `measures`, the metrics of the paper's figures; one collective, as there.

        `objectives.metrics` describes them. Detached scalars.
        """
        return self._over_batch(self.sums)

    @torch.no_grad()
    def _over_batch(self, sums: Sums) -> dict[str, Tensor]:
        sums = {**of_spread(self.unit.unflatten(0, (2, -1))), **sums}
        if self.over_ranks:
            sums = over_ranks(sums, self.process_group)
        exact = torch.promote_types(self.unit.dtype, torch.float32)
        return {name: value.to(exact) for name, value in finished(sums).items()}


# Model wrappers (FSDP, DDP) look for tensors in the output of forward.
register_pytree_node(
    ObjectiveOutput,
    lambda output: ([getattr(output, name) for name in TENSORS], (output.over_ranks, output.process_group)),
    lambda tensors, ranks: ObjectiveOutput(*tensors, *ranks),
)
