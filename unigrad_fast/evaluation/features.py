"""Features of a frozen encoder for every usable image of a manifest."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast.pipelines import EvaluationLoader, Failure, Manifest
from unigrad_fast.runtime.errors import RunStopped
from unigrad_fast.runtime.process_group import gather, on_all_ranks

# Rows to transfer at once: 0.5 GiB of fp32 at 2048 features.
ROWS_AT_ONCE = 65_536


@dataclass(frozen=True)
class LeftOut:
    """Images that could not be used, over all ranks.

    Attributes:
        count, images: number of unusable images, and of all images.
        first: the first unusable one in the manifest; None if there is none.
    """

    count: int
    images: int
    first: Failure | None

    @property
    def example(self) -> str:
        """The path of the first one, as valid Unicode text, and what is wrong with it."""
        path = self.first.path.encode(errors="surrogateescape").decode(errors="replace")
        return f"{path}: {self.first.reason}"

    def told(self, kind: str, fate: str = "left out") -> list[str]:
        """A line for the user about these images of a kind, such as "training"; empty if all could be used."""
        if self.first is None:
            return []
        one = self.count == 1
        return [
            f"{self.count:,} of {self.images:,} {kind} images could not be used and {'was' if one else 'were'} {fate}, "
            f"{'' if one else 'first '}{self.example}"
        ]


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
    timeout: float = 60.0,
    max_bad_fraction: float = 0.0,
) -> tuple[Tensor, Tensor | None, LeftOut]:
    """Runs every image of the manifest once through the backbone in evaluation mode.

    Images that cannot be used are left out.

    Args:
        backbone: maps normalised images fp32 [N, 3, S, S] to features [N, D]. It must be on `device`. The mode of its
            modules (training or evaluation) is restored afterwards.
        image_size, crop_fraction: the short side is resized to image_size / crop_fraction pixels, then the centre is
            cropped.
        batch_size: images per forward and rank.
        rank, world_size: this rank's share; above 1 every rank of the default process group must call this
            together.
        autocast_dtype: dtype of autocast; None for no autocast.
        threads: number of decoder threads of this rank; None lets the loader choose.
        decode: device that decodes; None is `device`.
        timeout: seconds after which a file that does not answer is left out.
        max_bad_fraction: share of the images that may be left out.

    Returns:
        Features fp32 [N, D] and labels int64 [N] (None without labels) of the N images that could be used, in the
        order of the manifest, on the CPU, and the images that were left out; the same on all ranks.

    Raises RunStopped on all ranks if a feature is not finite, or too many or all images cannot be used.
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
        timeout=timeout,
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
    left_out = count_left_out(loader.failures, len(manifest), max_bad_fraction, shared=world_size > 1)
    if world_size > 1:
        features = _sum_over_ranks(features, seen, device)
    found = (seen == 1).nonzero().flatten()
    if len(found) + left_out.count != len(manifest):
        raise AssertionError(
            f"of {len(manifest)} images {len(found)} were read once, {int((seen > 1).sum())} several times, and "
            f"{left_out.count} left out"
        )
    labels = torch.as_tensor(manifest.labels, dtype=torch.int64)[found] if manifest.has_labels else None
    return _keep(features, found), labels, left_out


def count_left_out(failures: Iterable[Failure], images: int, most: float, *, shared: bool = True) -> LeftOut:
    """Merges the unusable images of all ranks, which call this together.

    Args:
        failures: this rank's failures.
        images: number of images.
        most: share of the images that may be left out.
        shared: whether the images are divided over the ranks; otherwise only this rank's failures count.

    Raises RunStopped on all ranks if more than this share, or all, cannot be used.
    """
    own = {failure.image: failure for failure in failures}
    bad = {image: failure for part in (gather(own) if shared else [own]) for image, failure in part.items()}
    left_out = LeftOut(len(bad), images, bad[min(bad)] if bad else None)
    if bad and (len(bad) > most * images or len(bad) == images):
        raise RunStopped(
            f"{len(bad):,} of {images:,} images cannot be used"
            + ("" if len(bad) == images else f", more than data.max_bad_fraction = {most:g} allows")
            + f", first {left_out.example}; run `unigrad-fast data scan` to list them all, and repair or remove them"
        )
    return left_out


@torch.no_grad()
def features_of(
    backbone: nn.Module, loader: EvaluationLoader, device: torch.device, autocast_dtype: torch.dtype | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Features fp32 [N, D] on the device, and their positions in the manifest, int64 [N] on the CPU, batch by batch.

    Raises RunStopped if a feature is not finite.
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
    """Sets evaluation mode, then restores the mode of each module, since that of a frozen part may differ."""
    before = {module: module.training for module in backbone.modules()}
    backbone.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _sum_over_ranks(features: Tensor | None, seen: Tensor, device: torch.device) -> Tensor:
    """Merges the ranks' rows: each is zero on all ranks but one, so the sum is exact and sizes may differ."""
    dim = torch.tensor([0 if features is None else features.shape[1]], device=device)
    dist.all_reduce(dim, dist.ReduceOp.MAX)  # a rank without images does not know the width
    if features is None:
        features = torch.zeros(len(seen), int(dim))
    for tensor in (features, seen):
        for block in tensor.split(ROWS_AT_ONCE):
            travelling = block.to(device)
            dist.all_reduce(travelling)
            block.copy_(travelling)
    return features


def _keep(features: Tensor, rows: Tensor) -> Tensor:
    """Moves some rows, ascending, to the front of the same tensor: a second copy of a large bank may not fit."""
    if len(rows) == len(features):
        return features
    for start in range(0, len(rows), ROWS_AT_ONCE):
        block = rows[start : start + ROWS_AT_ONCE]
        features[start : start + len(block)] = features[block]
    return features[: len(rows)]


def non_finite(manifest: Manifest, image: int) -> RunStopped:
    """The error for an image whose features are not finite."""
    return RunStopped(
        f"non-finite features, first for {manifest.path(image)}; the encoder's weights or its batch-norm statistics "
        "are damaged; use weights saved earlier, or lower optimizer.base_lr"
    )
