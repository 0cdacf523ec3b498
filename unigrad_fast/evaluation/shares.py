"""Features in shares: every rank keeps those of its own images, in half precision, and no rank ever has all of them.

A row is the unit feature times almost 4096, rounded to whole numbers, which half precision holds. Of two such rows the
products, and every sum of some of them, are whole numbers of at most 2²⁴ (Cauchy and Schwarz), which fp32 holds: their
product is exact, whatever the order of the sum, and so the same in any block, on any rank and device. The cosine of two
rows differs from that of the features themselves by about 1e-4, as it does where these are rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from unigrad_fast import config
from unigrad_fast.evaluation.features import LeftOut, extract
from unigrad_fast.pipelines import EvaluationLoader, Manifest
from unigrad_fast.runtime.process_group import World

LARGEST = 4096.0  # norm of a row: its square is the largest whole number up to which fp32 holds all


@dataclass(frozen=True)
class Share:
    """What one rank has of a set of images.

    Attributes:
        rows: rounded unit features, fp16 [n, D], as `rounded` makes them; on the device, or on the host where it has
            little memory left.
        labels: int64 [n], on the CPU.
        left_out: what could not be used, over all ranks.
    """

    rows: Tensor
    labels: Tensor
    left_out: LeftOut


def rounded(features: Tensor) -> Tensor:
    """Unit features times almost `LARGEST`, rounded to whole numbers, fp16 [n, D]; above 2048 to even ones."""
    radius = LARGEST - 2 - features.shape[1] ** 0.5 / 2  # rounding adds at most what is left out
    return (normalize(features.float(), dim=1) * radius).round().half()


def norms(rows: Tensor) -> Tensor:
    """Of rounded rows; 1 where a row is zero. float64 [n], the same wherever they are computed."""
    square = rows.float().square().sum(dim=1)  # exact
    return torch.where(square > 0, square, 1.0).double().sqrt()


def similarity_to(bank_BD: Tensor, device: torch.device) -> Callable[[Tensor], Tensor]:
    """What gives the product of rounded queries with a bank by the norm of its rows, fp32 [Q, B] on the device."""
    bank_BD = bank_BD.to(device)
    inverse_B, factor_BD = (1 / norms(bank_BD)).float(), bank_BD.float()
    return lambda query_QD: (query_QD.to(device).float() @ factor_BD.T).mul_(inverse_B)


def own_images(
    manifest: Manifest,
    data: config.Data,
    settings: config.Evaluation,
    world: World,
    image_size: int | None = None,
    crop_fraction: float | None = None,
) -> EvaluationLoader:
    """Centre crops of this rank's images.

    Args:
        image_size, crop_fraction: in place of the settings'.
    """
    return EvaluationLoader(
        manifest,
        image_size or data.image_size,
        crop_fraction or settings.crop_fraction,
        settings.batch_size,
        rank=world.rank,
        world_size=world.size,
        device=world.device if data.decode != "cpu" else "cpu",
        threads=data.threads,
        timeout=data.read_timeout,
        read_threads=data.read_threads,
    )


def read_share(
    backbone: nn.Module,
    loader: EvaluationLoader,
    device: torch.device,
    autocast_dtype: torch.dtype | None,
    max_bad_fraction: float,
) -> Share:
    """The features of this rank's images that can be used; with several ranks all of them call this together.

    Raises RunStopped on all ranks where a feature is not finite, or too many images or all of them cannot be used.
    """
    room = partial(_room, device=device)
    return Share(*extract(backbone, loader, device, autocast_dtype, max_bad_fraction, rounded, room))


def _room(count: int, width: int, device: torch.device) -> Tensor:
    """Space for rows, on the device if they take at most half of what is free there."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if 2 * count * width > (torch.cuda.mem_get_info(device)[0] + unused) / 2:
            device = torch.device("cpu")  # blocks travel
    return torch.empty(count, width, dtype=torch.float16, device=device)
