"""Features of a frozen encoder for every usable image of a manifest."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unigrad_fast.pipelines import EvaluationLoader, Failure, Manifest
from unigrad_fast.pipelines.reading.supply import allowed
from unigrad_fast.runtime.errors import RunStopped
from unigrad_fast.runtime.process_group import gather, on_all_ranks

PIXELS = 2**20  # of the images that a CPU has in the backbone at once


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
    loader: EvaluationLoader,
    device: torch.device,
    autocast_dtype: torch.dtype | None,
    max_bad_fraction: float,
    kept: Callable[[Tensor], Tensor] = Tensor.cpu,
    new_rows: Callable[[int, int], Tensor] = torch.empty,
) -> tuple[Tensor, LeftOut]:
    """Runs this rank's images once through the backbone in evaluation mode; all ranks call this together.

    Args:
        backbone: maps normalised images fp32 [N, 3, S, S] to features [N, D]. It must be on `device`. The mode of its
            modules (training or evaluation) is restored afterwards.
        autocast_dtype: dtype of autocast; None for no autocast.
        max_bad_fraction: share of the images that may be left out, as in `allowed`.
        kept: what is kept of features fp32 [N, D] on the device, as many rows.
        new_rows: allocates a tensor of that many rows and columns.

    Returns:
        What is kept of the N images that could be used, [N, D], in the order of the loader, and what was left out over
        all ranks.

    Raises RunStopped on all ranks if a feature is not finite, or too many or all images cannot be used.
    """
    manifest = loader.manifest
    rows = new_rows(0, 0)
    index: list[int] = []

    def read() -> None:
        nonlocal rows
        for features, places in features_of(backbone, loader, device, autocast_dtype):
            if not len(rows):
                rows = new_rows(len(loader.index), features.shape[1])
            rows[len(index) : len(index) + len(features)] = kept(features)
            index.extend(places.tolist())

    on_all_ranks(read)
    left_out = count_left_out(loader.failures, len(manifest), max_bad_fraction)
    counted = torch.tensor([len(index), len(set(index))])
    width = torch.tensor(rows.shape[1])
    if dist.is_initialized():
        dist.all_reduce(counted)
        dist.all_reduce(width, dist.ReduceOp.MAX)  # a rank without images has not seen it
    if counted.tolist() != [len(manifest) - left_out.count] * 2:
        raise AssertionError(
            f"of {len(manifest)} images {int(counted[1])} were read, {int(counted[0] - counted[1])} of them again, and "
            f"{left_out.count} left out"
        )
    return rows[: len(index)].view(len(index), int(width)), left_out


def count_left_out(failures: Iterable[Failure], images: int, most: float) -> LeftOut:
    """Joins what the ranks, which call this together, could not use.

    Args:
        failures: of this rank.
        images: that there are.
        most: share of them that may be left out, as in `allowed`.

    Raises RunStopped on all ranks if more than this share, or all, cannot be used.
    """
    own = {failure.image: failure for failure in failures}
    bad = {image: failure for part in gather(own) for image, failure in part.items()}
    left_out = LeftOut(len(bad), images, bad[min(bad)] if bad else None)
    if bad and (len(bad) > allowed(images, most) or len(bad) == images):
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
                output = in_parts(backbone, images.to(device))
            if len(bad := (~output.isfinite().all(dim=1)).nonzero().flatten().cpu()):
                raise non_finite(loader.manifest, int(index[bad[0]]))
            yield output.float(), index.cpu()


def in_parts(backbone: nn.Module, images: Tensor) -> Tensor:
    """The backbone's features [N, D] of images [N, 3, S, S]; on a CPU a few images at a time.

    There larger activations leave the caches and cost page faults: ResNet-50 at 224 pixels, on two cores in bf16, takes
    77 images per second in parts of 16, and 46 in parts of 128.
    """
    if images.device.type != "cpu":
        return backbone(images)
    at_once = max(1, PIXELS // (images.shape[-2] * images.shape[-1]))
    return torch.cat([backbone(part) for part in images.split(at_once)])


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


def non_finite(manifest: Manifest, image: int) -> RunStopped:
    """The error for an image whose features are not finite."""
    return RunStopped(
        f"non-finite features, first for {manifest.path(image)}; the encoder's weights or its batch-norm statistics "
        "are damaged; use weights saved earlier, or lower optimizer.base_lr"
    )
