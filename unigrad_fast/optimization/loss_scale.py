"""The loss scale of fp16, chosen on the device: the host never reads it.

In fp16 gradients vanish below 6e-8 and overflow above 65,504. The loss is multiplied by a power of two before backward,
and the optimizer divides the gradients, in fp32, by the same number. The scale is halved after a step whose gradients
overflowed, and doubled after `PATIENCE` steps without one, as in torch's GradScaler.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST = 2.0**16  # as in torch's GradScaler
LEAST = 1.0  # gradients that overflow without a scale are the run's own fault
MOST = 2.0**24  # as in Apex
PATIENCE = 2000  # as in torch's GradScaler


class LossScale:
    """A loss scale that is the same for all micro-batches of a step, and on all ranks.

    Attributes:
        value: the scale, an fp32 scalar on the device; a power of two from `LEAST` to `MOST`.
        good_steps: int64 scalar, steps that were not dropped since the scale last changed.
        overflowed: fp32 scalar: 1 if in this step only gradients were not finite, else 0.
    """

    def __init__(self, device: torch.device):
        self.value = torch.full((), FIRST, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.overflowed = torch.zeros((), dtype=torch.float32, device=device)

    def note(self, forward: Tensor, gradients: Tensor) -> None:
        """Call when all of a step's gradients are known, with flags that are the same on all ranks.

        Args:
            forward: not 0 if a value of a forward pass was not finite, which no scale can help.
            gradients: not 0 if a gradient was not finite.
        """
        self.overflowed.copy_((gradients != 0) & (forward == 0))

    @torch.no_grad()
    def update(self, dropped: Tensor) -> Tensor:
        """Call at the end of a step: sets the next step's scale.

        Args:
            dropped: not 0 if the step was dropped, for whatever reason.

        Returns:
            Whether the step was dropped only because of a scale that can still be lowered; a boolean scalar.
        """
        overflowed = self.overflowed != 0
        answered = overflowed & (self.value > LEAST)
        self.good_steps.add_(dropped == 0)
        grows = self.good_steps >= PATIENCE
        factor = torch.where(overflowed, 0.5, torch.where(grows, 2.0, 1.0))
        self.value.mul_(factor).clamp_(LEAST, MOST)
        self.good_steps.mul_(~(overflowed | grows))
        return answered
