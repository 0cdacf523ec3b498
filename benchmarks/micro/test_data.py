"""Images from disk to augmented views, on the CPU."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from PIL import Image

IMAGES, BATCH_SIZE = 64, 32


@pytest.fixture
def images(tmp_path, monkeypatch):
    """A folder of JPEG files of 400 x 300 pixels: smooth colours with a little noise."""
    monkeypatch.setenv("UNIGRAD_CACHE", str(tmp_path / "cache"))
    folder, random = tmp_path / "images", np.random.default_rng(0)
    folder.mkdir()
    for number in range(IMAGES):
        coarse = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((400, 300), Image.Resampling.BICUBIC), dtype=np.float32)
        noisy = (smooth + random.normal(0, 4, smooth.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"{number:03}.jpg", quality=90)
    return folder


@pytest.mark.benchmark(group="data")
def test_batch_of_the_loader(benchmark, public, images):
    """32 images, two views of 224 pixels each; many batches are taken, because the loader prefetches."""
    Loader, Manifest = public("unigrad_fast.pipelines:Loader"), public("unigrad_fast.pipelines:Manifest")
    loader = Loader(Manifest.from_folder(images), "simsiam", batch_size=BATCH_SIZE, seed=0, device="cpu")
    with closing(loader.iterate()) as batches:
        benchmark.pedantic(lambda: next(batches), rounds=20, warmup_rounds=4)
