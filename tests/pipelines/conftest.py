from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from PIL import Image, ImageDraw
from sklearn.datasets import load_sample_images

from unigrad_fast.pipelines import Manifest

settings.register_profile("pipelines", deadline=None, derandomize=True)
settings.load_profile("pipelines")

COUNT = 103  # prime: divides over nothing
CLASSES = 5


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("UNIGRAD_CACHE", str(tmp_path / "cache"))


def draw(number: int, width: int, height: int) -> Image.Image:
    """Smooth colours, sharp edges and a little noise: what a photograph has."""
    random = np.random.default_rng(number)
    across, down = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    waves = [np.sin(2 * np.pi * (random.uniform(0, 2) * across + random.uniform(0, 2) * down)) for _ in range(3)]
    field = 128 + 90 * np.stack(waves, axis=-1) + random.normal(0, 4, (height, width, 3))
    image = Image.fromarray(field.clip(0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    for _ in range(4):
        x, y = random.uniform(0, width), random.uniform(0, height)
        radius = random.uniform(0.05, 0.3) * min(width, height)
        colour = tuple(random.integers(0, 256, 3).tolist())
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    return image


@pytest.fixture(scope="session")
def tree(tmp_path_factory) -> Path:
    """An ImageFolder tree of 103 small JPEG files in five classes."""
    root = tmp_path_factory.mktemp("tree")
    random = np.random.default_rng(0)
    for number in range(COUNT):
        folder = root / f"class{number % CLASSES}"
        folder.mkdir(exist_ok=True)
        width, height = random.integers(24, 64, 2).tolist()
        draw(number, width, height).save(folder / f"{number:03}.jpg", quality=92)
    return root


@pytest.fixture
def manifest(tree) -> Manifest:
    return Manifest.from_folder(tree)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Path:
    """A flat folder of larger drawn images."""
    root = tmp_path_factory.mktemp("pictures")
    for number, (width, height) in enumerate([(320, 240), (200, 300), (500, 375), (256, 256)]):
        draw(1000 + number, width, height).save(root / f"{number}.jpg", quality=92)
    return root


@pytest.fixture(scope="session")
def photographs(tmp_path_factory) -> Path:
    """A flat folder of 16 JPEG files cut from scikit-learn's two photographs, as differently written as ImageNet's."""
    root = tmp_path_factory.mktemp("photographs")
    temple, flower = (Image.fromarray(pixels) for pixels in load_sample_images().images)
    exif = Image.Exif()
    exif[0x010F] = "a camera"
    writings = (
        dict(quality=95, subsampling="4:4:4"),
        dict(quality=75, subsampling="4:2:0"),
        dict(quality=90, subsampling="4:2:2", exif=exif),
        dict(quality=60, progressive=True),
    )
    boxes = ((0, 0, 640, 427), (70, 25, 570, 400), (250, 0, 535, 427), (333, 101, 469, 251))
    for number in range(16):
        image = (flower if number % 3 == 1 else temple).crop(boxes[(number + number // 4) % 4])
        if number == 3:
            image = image.convert("L")
        image.save(root / f"{number:02}.jpg", **writings[number % 4])
    return root
