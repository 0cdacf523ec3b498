"""A small ImageFolder tree of JPEG files, fast to make, for tests of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def draw_tree(root: Path, per_class: int, classes: int = 2, size: int = 40) -> Path:
    """root/class0 ... with `per_class` JPEG files each; a class is a direction of stripes."""
    across, down = np.meshgrid(np.arange(size), np.arange(size))
    for label in range(classes):
        folder = root / f"class{label}"
        folder.mkdir(parents=True)
        angle = np.pi * label / classes
        for number in range(per_class):
            random = np.random.default_rng([label, number])
            stripes = np.sin((across * np.cos(angle) + down * np.sin(angle)) * random.uniform(0.3, 0.6))
            pixels = 128 + 60 * stripes[..., None] * random.uniform(-1, 1, 3) + random.normal(0, 8, (size, size, 3))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number:03}.jpg", quality=90)
    return root
