"""The positive of each view. Shape suffixes: V views, N images, C embedding width."""

from __future__ import annotations

import torch
from torch import Tensor

from unigrad_fast.objectives.layout import Mix


def positives(target_2NC: Tensor, views: int, mix: Mix | None) -> Tensor:
    """m⁺ of all views, [V, N, C].

    For a global view, the other global view's target, mixed as the view was: ratio·m[i] + (1−ratio)·m[partner]. For a
    local crop, the mean of both targets, not normalised again.
    """
    crossed = []
    for number, other_NC in enumerate((target_2NC[1], target_2NC[0])):
        if mix is not None:
            share_N1 = mix.ratio[number].to(other_NC.dtype).unsqueeze(-1)
            other_NC = torch.lerp(other_NC[mix.partner[number]], other_NC, share_N1)
        crossed.append(other_NC)
    return torch.stack(crossed + [target_2NC.mean(0)] * (views - 2))
