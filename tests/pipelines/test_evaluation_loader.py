import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from unigrad_fast.pipelines import DataError, EvaluationLoader, Manifest
from unigrad_fast.pipelines.presets import DEVIATION, MEAN


@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_shows_every_image_once(manifest, world_size):
    seen = []
    for rank in range(world_size):
        batches = EvaluationLoader(manifest, 32, batch_size=10, rank=rank, world_size=world_size, threads=1)
        sizes = []
        for images, index in batches:
            assert images.shape == (len(index), 3, 32, 32)
            assert images.is_contiguous(memory_format=torch.channels_last)
            sizes.append(len(index))
            seen += index.tolist()
        assert len(sizes) == len(batches) and set(sizes[:-1]) <= {10}
    assert sorted(seen) == list(range(103))


def test_evaluation_with_more_ranks_than_images(pictures):
    manifest = Manifest.from_folder(pictures)
    counts = [len(list(EvaluationLoader(manifest, 32, rank=rank, world_size=6, threads=1))) for rank in range(6)]
    assert counts == [1, 1, 1, 1, 0, 0]


def test_evaluation_can_be_repeated(manifest):
    batches = EvaluationLoader(manifest, 32, threads=1)
    (first, _), (second, _) = next(iter(batches)), next(iter(batches))
    assert torch.equal(first, second)


@pytest.mark.parametrize("size, crop_fraction", [(224, 0.875), (151, 1.0)])
def test_evaluation_crops_as_torchvision(pictures, size, crop_fraction):
    assert_cropped_as_torchvision(Manifest.from_folder(pictures), size, crop_fraction)


def assert_cropped_as_torchvision(manifest, size, crop_fraction):
    transform = v2.Compose(
        [
            v2.Resize(round(size / crop_fraction)),
            v2.CenterCrop(size),
            v2.PILToTensor(),
        ]
    )
    ((images, index),) = EvaluationLoader(manifest, size, crop_fraction, threads=1)
    levels = 255 * (images * torch.tensor(DEVIATION)[:, None, None] + torch.tensor(MEAN)[:, None, None])
    for ours, i in zip(levels, index.tolist(), strict=True):
        with Image.open(manifest.path(i)) as image:
            theirs = transform(image.convert("RGB"))
        apart = (ours - theirs).abs()
        assert apart.mean() < 0.3 and (apart <= 1.01).float().mean() >= 0.99 and apart.max() <= 10.01


@pytest.mark.parametrize("size, crop_fraction", [(64, 0.875), (151, 1.0)])
def test_evaluation_crops_long_images_as_torchvision(tmp_path, size, crop_fraction):
    random = np.random.default_rng(0)
    for number, (width, height) in enumerate([(100, 800), (1601, 200), (40, 401), (3000, 41), (1, 600), (90, 30)]):
        noise = random.integers(0, 256, (-(-height // 4), -(-width // 4), 3), dtype=np.uint8)
        Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(tmp_path / f"{number}.png")
    assert_cropped_as_torchvision(Manifest.from_folder(tmp_path), size, crop_fraction)


def test_evaluation_resizes_no_more_of_long_images_than_of_others(manifest):
    batches = EvaluationLoader(manifest, 224)
    begin, end, size, _ = batches._geometry(np.array([[1, 65000], [65000, 1], [5000, 100], [400, 100], [300, 400]]))
    assert size.tolist() == [[224, 224]] * 3 + [[256, 1024], [341, 256]]
    assert begin[3:].tolist() == [[0, 0]] * 2 and end[3:].tolist() == [[1, 1]] * 2


def test_evaluation_refuses_an_impossible_crop(manifest):
    with pytest.raises(DataError, match=r"crop fraction 1\.5"):
        EvaluationLoader(manifest, 32, crop_fraction=1.5)
