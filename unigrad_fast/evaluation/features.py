"""Features of a frozen encoder for every image of a manifest."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast.distributed import on_all_ranks
from unigrad_fast.errors import RunStopped
from unigrad_fast.pipelines import EvaluationLoader, Manifest

# Rows that travel at once: 0.5 GiB of fp32 at 2048 features.
ROWS_AT_ONCE = 65_536


@torch.no_grad()
def extract(
    backbone: nn.Module,
    manifest: Manifest,
    *,
    image_size: int,
    crop_fraction: float = 0.875,
    batch_size: int = 256,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world_size: int = 1,
    autocast_dtype: torch.dtype | None = None,
    threads: int | None = None,
    decode: torch.device | str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Runs every image of the manifest once through the backbone in evaluation mode.

    Args:
        backbone: maps normalised images fp32 [N, 3, S, S] to features [N, D]; it lies on `device`, and each
            of its
            modules is left in the mode (training or evaluation) that it was found in.
        image_size, crop_fraction: the short side is resized to image_size / crop_fraction pixels, the centre
            is cut out.
        batch_size: images per forward and rank.
        rank, world_size: this rank's share; above 1 every rank of the default process group must call this
            together.
        autocast_dtype: computes under autocast in this dtype; None leaves the backbone's own precision.
        threads: decoder threads of this rank; None lets the loader choose.
        decode: device that decodes; None is `device`.

    Returns:
        Features fp32 [len(manifest), D] and labels int64 [len(manifest)] (None without labels), in the order
        of the manifest, on the CPU, the same on all ranks.

    Raises RunStopped on all ranks where a feature is not finite, DataError on all where an image cannot be decoded.
    """
    device = torch.device(device)
    loader = EvaluationLoader(
        manifest,
        image_size,
        crop_fraction,
        batch_size,
        rank=rank,
        world_size=world_size,
        device=decode or device,
        threads=threads,
    )
    features: Tensor | None = None
    seen = torch.zeros(len(manifest), dtype=torch.int32)

    def read() -> None:
        nonlocal features
        for output, index in features_of(backbone, loader, device, autocast_dtype):
            if features is None:
                features = torch.zeros(len(manifest), output.shape[1])
            features[index] = output.cpu()
            seen[index] += 1

    if world_size > 1:
        on_all_ranks(read)
    else:
        read()
    if world_size > 1:
        features = _sum_over_ranks(features, seen, device)
    if not bool((seen == 1).all()):
        wrong = int((seen != 1).nonzero()[0, 0])
        raise AssertionError(f"image {wrong} of {len(manifest)} was read {int(seen[wrong])} times instead of once")
    labels = torch.as_tensor(manifest.labels, dtype=torch.int64) if manifest.has_labels else None
    return features, labels


@torch.no_grad()
def features_of(
    backbone: nn.Module, loader: EvaluationLoader, device: torch.device, autocast_dtype: torch.dtype | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Features fp32 [N, D] on the device, and their places in the manifest, int64 [N] on the CPU, batch by batch.

    Raises RunStopped where a feature is not finite.
    """
    autocast = torch.autocast(device.type, autocast_dtype, enabled=autocast_dtype is not None)
    with evaluation_mode(backbone):
        for images, index in loader:
            with autocast:
                output = backbone(images.to(device))
            if len(bad := (~output.isfinite().all(dim=1)).nonzero().flatten().cpu()):
                raise non_finite(loader.manifest, int(index[bad[0]]))
            yield output.float(), index.cpu()


@contextmanager
def evaluation_mode(backbone: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, then each module's own mode again: a frozen part may differ from the whole."""
    before = {module: module.training for module in backbone.modules()}
    backbone.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _sum_over_ranks(features: Tensor | None, seen: Tensor, device: torch.device) -> Tensor:
    """Joins the ranks' rows: each is zero on all ranks but one, so the sum is exact and sizes may differ."""
    dim = torch.tensor([0 if features is None else features.shape[1]], device=device)
    dist.all_reduce(dim, dist.ReduceOp.MAX)  # a rank without images has not seen the width
    if features is None:
        features = torch.zeros(len(seen), int(dim))
    for tensor in (features, seen):
        for block in tensor.split(ROWS_AT_ONCE):
            travelling = block.to(device)
            dist.all_reduce(travelling)
            block.copy_(travelling)
    return features


def non_finite(manifest: Manifest, image: int) -> RunStopped:
    """The error for an image whose features are not finite."""
    return RunStopped(
        f"non-finite features, first for {manifest.path(image)}; the encoder's weights or its batch-norm statistics "
        "are damaged: use weights saved earlier, or lower optimizer.base_lr"
    )
