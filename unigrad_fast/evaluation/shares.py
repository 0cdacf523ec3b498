"""Features in shares: every rank keeps those of its own images, in half precision; no rank has all of them.

A row is the unit feature times almost 4096, rounded to integers, which half precision represents exactly. The products
of the elements of two rows, and all partial sums of them, are integers of at most 2²⁴ (Cauchy-Schwarz), which fp32
represents exactly. So the inner product of two rows is exact in any order of summation, and the same in any block, on
any rank and device. The cosine of two rows differs from that of the features by about 1e-4, as with rounding to bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from unigrad_fast import config
from unigrad_fast.evaluation.features import LeftOut
from unigrad_fast.evaluation.rows import Features
from unigrad_fast.pipelines import EvaluationLoader, Manifest
from unigrad_fast.runtime.process_group import World

LARGEST = 4096.0  # norm of a row: fp32 represents all integers up to its square


@dataclass(frozen=True)
class Share:
    """One rank's share of the features of a set of images.

    Attributes:
        rows: rounded unit features, fp16 [n, D], as `rounded` makes them; on the device, or on the host if the
            device has little memory left.
        labels: int64 [n], on the CPU.
        left_out: images that could not be used, over all ranks.
    """

    rows: Tensor
    labels: Tensor
    left_out: LeftOut


def rounded(features: Tensor) -> Tensor:
    """Unit features times almost `LARGEST`, rounded to integers, fp16 [n, D]; to even integers above 2048."""
    radius = LARGEST - 2 - features.shape[1] ** 0.5 / 2  # rounding adds at most the difference
    return (normalize(features.float(), dim=1) * radius).round().half()


def norms(rows: Tensor) -> Tensor:
    """Norms of rounded rows, float64 [n]; 1 for zero rows. The same on every device."""
    square = rows.float().square().sum(dim=1)  # exact
    return torch.where(square > 0, square, 1.0).double().sqrt()


def similarity_to(bank_BD: Tensor, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function that multiplies rounded queries with a bank over the norms of its rows, fp32 [Q, B] on the device."""
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
        image_size, crop_fraction: None takes the configuration's.
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


def share_of(features: Features, labels: Sequence[int], world: World) -> Share:
    """This rank's share of features of images with these labels."""
    positions = features.usable(world.rank, world.size)
    rows, start = room(world.device, len(positions), features.width), 0
    for _, block in features.blocks(positions):
        rows[start : start + len(block)] = rounded(block[:, :-1].to(world.device))
        start += len(block)
    return Share(rows, torch.as_tensor(labels, dtype=torch.int64)[torch.from_numpy(positions)], features.left_out)


def room(device: torch.device, count: int, width: int) -> Tensor:
    """Memory for rows of a share, fp16: on the device if they take at most half of what is free there."""
    place = device
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if 2 * count * width > (torch.cuda.mem_get_info(device)[0] + unused) / 2:
            place = torch.device("cpu")  # blocks are copied when needed
    return torch.empty(count, width, dtype=torch.float16, device=place)
