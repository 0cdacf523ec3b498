"""Normalisation of a batch, on this rank and over all ranks, and the gradient back through it to the embeddings.

Shape suffixes: V views, N images of this rank, K images of all ranks, M = V·N rows, C embedding width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unigrad_fast.kernels import functional
from unigrad_fast.objectives.forms.rows import Row
from unigrad_fast.objectives.layout import Layout
from unigrad_fast.objectives.over_ranks import Gathered
from unigrad_fast.objectives.predictor import EPSILON


@dataclass
class Normalised:
    """Normalised embeddings; rows that are not finite are 0.

    Attributes:
        unit_online, unit_target: [M, C] and [2·N, C] of this rank, ℓ2-normalised whatever the row's normalisation is.
        inverse_norm: [M], of the online embeddings.
        online, target: u [V, N, C] and m [2, N, C] of this rank.
        all_online, all_target: [·, K, C] over all ranks, with only as many views as the row of the table needs.
        gathered: the number of images over all ranks, and the slice of K that belongs to this rank.
        deviation: [V, 1, C], batch norm's √(var + ε); None for other normalisations.
        finite: [V, N, 1], whether a row of the online branch is finite.
    """

    unit_online: Tensor
    unit_target: Tensor
    inverse_norm: Tensor
    online: Tensor
    target: Tensor
    all_online: Tensor
    all_target: Tensor
    gathered: Gathered
    deviation: Tensor | None
    finite: Tensor

    @property
    def exact(self) -> torch.dtype:
        return torch.promote_types(self.online.dtype, torch.float32)


def normalise(
    row: Row,
    online: Sequence[Tensor],
    target: Sequence[Tensor],
    layout: Layout,
    gather: Callable[[Tensor], Gathered],
) -> Normalised:
    """Normalise the embeddings and gather those that the row needs from all ranks; writes the flags of `layout`.

    Args:
        gather: gathers [·, N, C] from all ranks.
    """
    views, images = len(online), layout.images
    unit_MC, inverse_norm_M = layout.units([*online, *target], functional)
    finite_VN1 = (layout.nonfinite == 0).view(views + 2, images, 1)
    if row.normalisation == "l2":
        rows_VNC = unit_MC.unflatten(0, (views + 2, images))
    else:
        exact = torch.promote_types(layout.unit_dtype, torch.float32)
        rows_VNC = torch.stack([view.to(exact) for view in (*online, *target)])
        rows_VNC.masked_fill_(~finite_VN1, 0.0)
    if row.normalisation == "batch_norm" or row.negative == "cross_batch":
        needs = (views, 2)  # the statistics of batch norm are over all ranks
    elif row.negative == "own_batch":
        needs = (views, 0)
    else:
        needs = (2, 0) if row.source == "online" else (0, 2)
    online_VNC, target_2NC = rows_VNC[:views], rows_VNC[views:]
    # Not concatenated if they are already adjacent.
    own_VNC = rows_VNC if needs == (views, 2) else target_2NC if needs[0] == 0 else online_VNC[: needs[0]]
    gathered, deviation = gather(own_VNC), None
    all_VKC = gathered.rows
    if row.normalisation == "batch_norm":
        all_VKC, deviation_V1C = _standardised(gathered)
        own_VNC = all_VKC[:, gathered.own]
        online_VNC, target_2NC, deviation = own_VNC[:views], own_VNC[views:], deviation_V1C[:views]
    return Normalised(
        unit_MC[: layout.rows],
        unit_MC[layout.rows :],
        inverse_norm_M[: layout.rows],
        online_VNC,
        target_2NC,
        all_VKC[: needs[0]],
        all_VKC[needs[0] :],
        gathered,
        deviation,
        finite_VN1[:views],
    )


def _standardised(gathered: Gathered) -> tuple[Tensor, Tensor]:
    """(x − mean) / √(var + ε) per view over all ranks, 0 for padding; and √(var + ε)."""
    count = gathered.count.clamp_min(1)
    centred_VKC = gathered.rows - gathered.rows.sum(1, keepdim=True) / count
    if gathered.is_image is not None:
        centred_VKC = centred_VKC * gathered.is_image[:, None]
    variance_V1C = centred_VKC.square().sum(1, keepdim=True) / count
    deviation_V1C = (variance_V1C + EPSILON).sqrt()
    return centred_VKC.div_(deviation_V1C), deviation_V1C


def through_normalisation(
    row: Row, step_VNC: Tensor, batch: Normalised, scale: float, total: Callable[[Tensor], Tensor]
) -> Tensor:
    """dL/dz times `scale`, [M, C]: g = dL/du differentiated through the normalisation.

    Args:
        step_VNC: g.
        total: sums a tensor over ranks.
    """
    if row.normalisation == "l2":
        step_MC, unit_MC = step_VNC.flatten(0, 1), batch.unit_online.to(step_VNC.dtype)
        step_MC = step_MC - unit_MC * (unit_MC * step_MC).sum(-1, keepdim=True)
        return step_MC * (batch.inverse_norm * scale).unsqueeze(-1)
    if batch.deviation is not None:
        sums_2VC = total(torch.stack([step_VNC.sum(1), (step_VNC * batch.online).sum(1)]))
        mean_2V1C = (sums_2VC / batch.gathered.count.clamp_min(1)).unsqueeze(2)
        step_VNC = (step_VNC - mean_2V1C[0] - batch.online * mean_2V1C[1]) / batch.deviation
    return torch.where(batch.finite, step_VNC, 0.0).flatten(0, 1).mul_(scale)
