"""Configurations for benchmarks: the user's, with some keys changed, and with drawn images if there are none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unigrad_fast.config import Config, resolve
from unigrad_fast.images import drawing
from unigrad_fast.pipelines import Manifest
from unigrad_fast.runtime.trees import merge
from unigrad_fast.runtime.validation import validate

SELDOM = 10**9  # steps between reports, so large that there are none


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The configuration with a tree of changes applied.

    Raises:
        UserError: the changes do not fit the configuration.
    """
    return validate(Config, merge(config.model_dump(), changes))


def at_width(config: Config, width: int) -> Config:
    return changed(config, {"model": {"projector": {"width": width}}})


def lacks_images(config: Config) -> bool:
    """Whether there are no images: none are given, or those of the quickstart, which have not been drawn yet."""
    train = config.data.train
    return train is None or (train == resolve("quickstart").data.train and not train.exists())


def with_images(config: Config, output: Path) -> tuple[Config, str]:
    """The configuration and a description of its images; if it lacks some, the quickstart's are drawn in `output`."""
    if not lacks_images(config):
        return config, f"images of {config.data.train}"
    folder = drawing.draw(output / "quickstart-images")
    images = {"train": folder / "train", "val": folder / "val"}
    return changed(config, {"data": images}), f"drawn images, in {folder}"


def long_enough(config: Config, steps: int) -> Config:
    """The configuration with enough epochs for at least `steps` + 1 steps."""
    images = len(Manifest.open(config.data.train))
    per_epoch = max(1, images // config.data.batch_size)
    epochs = max(config.schedule.epochs, -(-(steps + 1) // per_epoch))
    return changed(config, {"schedule": {"epochs": epochs}})
