"""`load_encoder` gives an encoder as a function of images, `export` writes its weights for other programs.

Shape suffixes: N images, H and W pixels, D features.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import v2

from unigrad_fast.checkpoints.files import Reader
from unigrad_fast.checkpoints.weights import fill, load_branch
from unigrad_fast.commands.requirements import require_run
from unigrad_fast.evaluation.sources import Source, of_file, of_run
from unigrad_fast.interface.calls import Function, function_of
from unigrad_fast.interface.results import Result
from unigrad_fast.networks.encoder import build_encoder
from unigrad_fast.pipelines.presets import DEVIATION, MEAN, short_side
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.validation import absolute, shown

export: Function[Result] = function_of("export")
Images: TypeAlias = "Tensor | Image.Image | Sequence[Image.Image]"


class ImageEncoder(nn.Module):
    """Maps images to features, fp32 [N, D]; made by `load_encoder`, in evaluation mode and without gradients.

    It takes

    - a tensor [N, 3, H, W] of RGB values, uint8, or floating point from 0 to 1, as it is: neither resized nor cropped;
    - a picture of Pillow, or a list of them: converted to RGB, resized and centrally cropped to `image_size` as for
      `evaluate`, by torchvision.

    Values are normalised here, with ImageNet's mean and deviation. That floating-point values are from 0 to 1 is
    checked, for which the host waits for a GPU. `requires_grad_(True).train()` makes it ready for training.

    Attributes:
        network: the backbone, or the backbone and the projector.
        image_size: pixels of a picture's centre crop, and those that the encoder was trained for.
        width: D.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, network: nn.Module, width: int, image_size: int, crop_fraction: float) -> None:
        super().__init__()
        self.network, self.width, self.image_size = network, width, image_size
        self._prepare = v2.Compose([v2.Resize(short_side(image_size, crop_fraction)), v2.CenterCrop(image_size)])
        for name, value in (("mean", MEAN), ("deviation", DEVIATION)):
            self.register_buffer(name, torch.tensor(value).view(3, 1, 1), persistent=False)

    def __call__(self, images: Images) -> Tensor:
        """As `forward`, with the hooks of the module."""
        return super().__call__(images)

    def forward(self, images: Images) -> Tensor:
        """The features of images, fp32 [N, D] on the encoder's device.

        Raises:
            TypeError: neither a tensor of such a dtype nor pictures.
            ValueError: another layout, no images, or values outside of 0 to 1.
        """
        pixels_NCHW = checked(images) if isinstance(images, Tensor) else self.cropped(images)
        pixels_NCHW = pixels_NCHW.to(self.mean.device)
        values = pixels_NCHW.float() / 255 if pixels_NCHW.dtype == torch.uint8 else pixels_NCHW.float()
        normalised = (values - self.mean) / self.deviation
        return self.network(normalised.contiguous(memory_format=torch.channels_last)).float()

    def cropped(self, images: Image.Image | Sequence[Image.Image]) -> Tensor:
        """Pictures as the encoder sees them, before they are normalised: uint8 [N, 3, S, S]."""
        pictures = [images] if isinstance(images, Image.Image) else list(images)
        if odd := [each for each in pictures if not isinstance(each, Image.Image)]:
            raise TypeError(f"images: has a {type(odd[0]).__name__}; give a tensor [N, 3, H, W], or pictures of Pillow")
        if not pictures:
            raise ValueError("images: there are none; give at least one")
        return torch.stack([v2.functional.pil_to_tensor(self._prepare(each.convert("RGB"))) for each in pictures])


def checked(images_NCHW: Tensor) -> Tensor:
    """Images in a tensor. Raises TypeError or ValueError unless an encoder can take them."""
    shape, dtype = list(images_NCHW.shape), str(images_NCHW.dtype).removeprefix("torch.")
    if images_NCHW.dtype != torch.uint8 and not images_NCHW.is_floating_point():
        raise TypeError(f"images: are {dtype}; give uint8, or floating point from 0 to 1")
    if len(shape) == 3:
        raise ValueError(f"images: has the shape {shape}; give [N, 3, H, W], one image as images[None]")
    if len(shape) != 4 or shape[1] != 3:
        remedy = ", as images.permute(0, 3, 1, 2) is" if len(shape) == 4 and shape[3] == 3 else ""
        raise ValueError(f"images: has the shape {shape}; give [N, 3, H, W]{remedy}")
    if images_NCHW.numel() == 0:
        raise ValueError(f"images: there are none in the shape {shape}; give at least one")
    if images_NCHW.is_floating_point():
        low, high = (float(value) for value in images_NCHW.aminmax())
        if not 0 <= low <= high <= 1:
            remedy = "divide by 255" if low >= 0 and high <= 255 else "leave out any normalisation, which is done here"
            raise ValueError(f"images: has values from {low:g} to {high:g}; give them from 0 to 1: {remedy}")
    return images_NCHW


def load_encoder(
    source: str | os.PathLike[str],
    *,
    backbone: str | None = None,
    output: Literal["backbone", "embedding"] = "backbone",
    device: str | torch.device = "auto",
    checkpoint: int | None = None,
    image_size: int | None = None,
) -> ImageEncoder:
    """An encoder as a function of images.

    Args:
        source: a run or its folder, whose online branch is taken; or a file of weights: an export, torchvision's, or
            a published checkpoint as it comes.
        backbone: name of the backbone in a file, such as "resnet50"; None for what `export` has written.
        output: "backbone" for features, as `evaluate` judges them; "embedding" for a run's projector behind it.
        device: "auto" is the GPU if there is one.
        checkpoint: step of a run's checkpoint; None is the newest.
        image_size: pixels of a picture's centre crop; None is the run's, that of an export's description, or 224.

    Raises:
        UserError: there is no such encoder.
    """
    path = absolute(Path(os.fspath(source)))
    if not path.exists():
        raise UserError(f"source = {path}: no such file or folder; give a run, or a file of weights")
    is_run = path.is_dir()
    for name, value, is_wrong in (("backbone", backbone, is_run), ("checkpoint", checkpoint, not is_run)):
        if value is not None and is_wrong:
            raise UserError(f"{name} = {value}: applies only to a {'file' if is_run else 'run'}; leave it out")
    if is_run:
        require_run(path)
    found = of_run(path, checkpoint) if is_run else of_file(path, backbone, image_size)
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    encoder = build_encoder(found.config.model, found.config.seed, place)
    found.load(encoder.backbone)
    network: nn.Module = encoder.backbone
    width: Any = encoder.backbone.feature_dim
    if output == "embedding":
        fill(encoder.projector, _projector(found), found.path)
        network, width = nn.Sequential(encoder.backbone, encoder.projector), found.config.model.projector.width
    elif output != "backbone":
        raise UserError(f"output = {shown(output)}: must be one of backbone, embedding")
    size = image_size or found.config.data.image_size
    loaded = ImageEncoder(network, width, size, found.config.evaluation.crop_fraction)
    return loaded.to(place).eval().requires_grad_(False)


def _projector(source: Source) -> dict[str, Any]:
    state = load_branch(source.contents, "online.projector") if isinstance(source.contents, Reader) else {}
    if not state:
        raise UserError(f"output = embedding: {source.path} has no projector; use backbone")
    return state
