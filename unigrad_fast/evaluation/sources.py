"""Where the encoder that is evaluated comes from: a run, or a file of weights; with the settings that belong to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from unigrad_fast.checkpoints.export import metadata
from unigrad_fast.checkpoints.files import Reader, digest_of_file
from unigrad_fast.checkpoints.foreign import backbone_in, listed
from unigrad_fast.checkpoints.weights import configuration, fill, fingerprint, load_backbone, open_checkpoint
from unigrad_fast.config import Config, resolve
from unigrad_fast.evaluation.knn import BRANCH
from unigrad_fast.recipes.backbones import BACKBONES
from unigrad_fast.runtime.errors import UserError
from unigrad_fast.runtime.validation import shown

RECIPE = "imagenet_100ep"  # the settings of an evaluation without a run
IMAGE_SIZE, CROP_FRACTION = 224, 0.875  # as published ResNets are judged: short side 256, centre crop of 224

# What is used of the description of an export or a fine-tuned network, with its types.
DESCRIBED = {
    **{"backbone": str, "branch": str, "step": int},
    **{"epoch": int | float, "image_size": int, "crop_fraction": int | float},
}


@dataclass(frozen=True)
class Source:
    """An encoder before it is loaded.

    Attributes:
        path: the checkpoint's folder, or the file of weights.
        config: of its run; without one, the settings that are usual for ImageNet.
        about: JSON values of a result: branch, and step and epoch, None if unknown.
        name: what a table calls it: its epoch, or the name of the file.
        said, warned: lines for the user.
        contents: the checkpoint, or the backbone's state dict.
    """

    path: Path
    config: Config
    about: Mapping[str, Any]
    name: str
    said: tuple[str, ...]
    warned: tuple[str, ...]
    contents: Reader | Mapping[str, Tensor]

    def load(self, backbone: nn.Module) -> None:
        """Load the weights. Raises UserError if the checkpoint is damaged, or does not fit its configuration."""
        if isinstance(self.contents, Reader):
            load_backbone(self.contents, backbone)
        else:
            fill(backbone, self.contents, self.path)

    def digest(self) -> str:
        """Identifies the weights."""
        return fingerprint(self.contents) if isinstance(self.contents, Reader) else _digest(self.contents)


def of_run(run: Path, checkpoint: int | None) -> Source:
    """The online backbone of a checkpoint. Raises UserError if there is none."""
    reader = open_checkpoint(run, checkpoint)
    config, told = configuration(run, reader)
    about = {"branch": BRANCH, "step": reader.about["step"], "epoch": reader.about["epoch"]}
    return Source(reader.folder, config, about, f"epoch {about['epoch']:g}", (), tuple(told), reader)


def of_file(file: Path, backbone: str | None = None, image_size: int | None = None) -> Source:
    """The backbone in a file, as `foreign.backbone_in` finds it.

    Args:
        backbone: its name; None takes that of an export's description.
        image_size: side of the images in pixels; None takes that of an export's description, or else 224.

    Raises UserError if the file holds no such backbone, or the description has odd values.
    """
    exported = _description(file)
    backbone = backbone or exported.get("backbone")
    if backbone not in BACKBONES:
        raise UserError(f"backbone = {shown(backbone)}: {file} needs one of {', '.join(BACKBONES)}")
    found = backbone_in(file, backbone)
    config = resolve(
        RECIPE,
        {
            "model": {"backbone": backbone, "stem": found.stem},
            "data": {"image_size": image_size or exported.get("image_size", IMAGE_SIZE)},
            "evaluation": {"crop_fraction": exported.get("crop_fraction", CROP_FRACTION)},
        },
    )
    branch = f"{exported['branch']} backbone" if "branch" in exported else f"backbone {found.prefix}".strip()
    about = {"branch": branch, "step": exported.get("step"), "epoch": exported.get("epoch")}
    taken = f"the prefix {found.prefix}" if found.prefix else "no prefix"
    said = f"{file}: {backbone} under {taken}"
    if found.left_out:
        said += f"; left out: {listed(found.left_out)}"
    return Source(file, config, about, file.name, (said,), (), found.state)


def _description(file: Path) -> Mapping[str, Any]:
    """What `export` wrote beside a file, or a fine-tuning into it, without nulls; empty if neither wrote this file.

    Raises UserError if a value that is used has another type.
    """
    content, place = {}, file.with_name(f"{file.name}.json")
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        beside = json.loads(place.read_text(encoding="utf-8"))
        if beside["sha256"] == digest_of_file(file):
            content = beside
    if not content and file.suffix.lower() == ".safetensors":
        with suppress(ValueError, RecursionError):
            _, inside = metadata(file)
            if inside.keys() >= DESCRIBED.keys():
                content, place = inside, file
    about = {key: content[key] for key in DESCRIBED if content.get(key) is not None}
    for key, value in about.items():
        if not isinstance(value, DESCRIBED[key]) or isinstance(value, bool):
            raise UserError(f"{place}: {key} = {shown(value)}: not as `export` writes it; correct or remove the file")
    return about


def _digest(state: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].contiguous().numpy())
    return f"sha256-{digest.hexdigest()[:16]}"
