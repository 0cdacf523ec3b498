"""Features and baselines from real JPEG files through the real loader."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn

from unigrad_fast.errors import DataError, RunStopped
from unigrad_fast.evaluation import extract
from unigrad_fast.evaluation.baselines import ColourHistogram, RawPixels, colour_histogram, raw_pixels
from unigrad_fast.pipelines import Manifest

COLOURS = [(230, 30, 30), (30, 230, 30), (30, 30, 230), (230, 230, 30), (30, 230, 230)]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two classes of one-coloured images of several sizes, one colour per image: in order, COLOURS."""
    for number, colour in enumerate(COLOURS):
        place = tmp_path / "images" / ("a" if number < 3 else "b")
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20 + 3 * number, 24), colour).save(place / f"{number}.jpg", quality=95)
    return tmp_path / "images"


class MeanColour(nn.Module):
    """A backbone whose feature tells which image it saw, [N, 3], and which records how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, affine=False)
        self.calls: list[tuple[int, bool, bool]] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls.append((len(images), self.norm.training, torch.is_grad_enabled()))
        return self.norm(images).mean(dim=(2, 3))


def settings(**further) -> dict:
    return {"image_size": 16, "batch_size": 2, "threads": 1} | further


def expected_colours() -> torch.Tensor:
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (torch.tensor(COLOURS) / 255 - mean) / deviation


def test_features_and_labels_come_in_manifest_order(folder):
    backbone = MeanColour()
    features, labels = extract(backbone, Manifest.from_folder(folder), **settings())
    torch.testing.assert_close(features, expected_colours(), atol=0.05, rtol=0)
    assert labels.tolist() == [0, 0, 0, 1, 1]
    assert [count for count, _, _ in backbone.calls] == [2, 2, 1]


def test_without_labels_there_are_features_only(folder):
    features, labels = extract(MeanColour(), Manifest.from_folder(folder / "a"), **settings())
    assert features.shape == (3, 3)
    assert labels is None


def test_backbone_is_evaluated_without_gradient_and_left_as_it_was(folder):
    backbone = nn.Sequential(MeanColour(), nn.Dropout(), nn.Linear(3, 4)).train()
    backbone[1].eval()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    features, _ = extract(backbone, Manifest.from_folder(folder), **settings())
    assert {(training, gradient) for _, training, gradient in backbone[0].calls} == {(False, False)}
    assert [module.training for module in backbone.modules()] == [True, True, True, False, True]
    assert not features.requires_grad
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_autocast_computes_in_the_given_type_and_returns_fp32(folder):
    seen = []
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4))
    backbone.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    features, _ = extract(backbone, Manifest.from_folder(folder), **settings(autocast_dtype=torch.bfloat16))
    assert set(seen) == {torch.bfloat16}
    assert features.dtype == torch.float32


class NonFiniteForGreen(nn.Module):
    """Features that are infinite for the second image only."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        colour = images.mean(dim=(2, 3))
        green = (colour[:, 1:2] > 1) & (colour[:, :1] < 0) & (colour[:, 2:] < 0)
        return torch.where(green, torch.inf, colour)


def test_non_finite_feature_stops_with_the_file(folder):
    backbone = NonFiniteForGreen().train()
    with pytest.raises(RunStopped, match=r"non-finite.*a/1\.jpg"):
        extract(backbone, Manifest.from_folder(folder), **settings())
    assert backbone.training


def test_undecodable_file_is_named(folder):
    path = folder / "b" / "4.jpg"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataError, match=r"4\.jpg"):
        extract(MeanColour(), Manifest.from_folder(folder), **settings())


def share_of_two(folder: Path, single: Path) -> dict:
    """On one of two ranks: what `extract` gives for five images, for one, and for a non-finite feature."""
    shared = settings(rank=dist.get_rank(), world_size=2)
    backbone = MeanColour()
    five = extract(backbone, Manifest.from_folder(folder), **shared)[0]
    one = extract(MeanColour(), Manifest.from_folder(single), **shared)[0]
    with pytest.raises(RunStopped) as stopped:
        extract(NonFiniteForGreen(), Manifest.from_folder(folder), **shared)
    images = sum(count for count, _, _ in backbone.calls)
    return {"five": five, "images": images, "one": one, "message": str(stopped.value)}


def test_two_ranks_share_the_images_and_get_all_features(folder, tmp_path, workers):
    (tmp_path / "single").mkdir()
    Image.new("RGB", (20, 20), COLOURS[0]).save(tmp_path / "single" / "0.jpg", quality=95)
    alone = extract(MeanColour(), Manifest.from_folder(folder), **settings())[0]
    results = workers(2).run(share_of_two, folder, tmp_path / "single")
    assert sorted(result["images"] for result in results) == [2, 3]
    for result in results:
        torch.testing.assert_close(result["five"], alone, atol=1e-6, rtol=0)
        torch.testing.assert_close(result["one"], alone[:1], atol=0.05, rtol=0)
        assert "a/1.jpg" in result["message"]


def test_raw_pixels_are_standardised_per_image():
    images = torch.randn(3, 3, 8, 8)
    features = RawPixels()(images)
    torch.testing.assert_close(features.std(dim=1), torch.ones(3))
    torch.testing.assert_close(RawPixels()(2 * images + 1), features)
    assert RawPixels()(torch.ones(1, 3, 8, 8)).abs().max() == 0


def test_raw_pixels_of_files_correlate_with_the_same_picture_only(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(2):
        picture = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(picture).resize((48, 48)).save(tmp_path / f"{number}_dark.jpg", quality=95)
        brighter = Image.fromarray((picture // 2 + 100).astype(np.uint8)).resize((64, 64))
        brighter.save(tmp_path / f"{number}_light.jpg", quality=95)
    features = torch.nn.functional.normalize(raw_pixels(Manifest.from_folder(tmp_path), threads=1))
    assert features.shape == (4, 3 * 32 * 32)
    similarity = features @ features.T
    assert similarity[0, 1] > 0.9 and similarity[2, 3] > 0.9
    assert similarity[0, 2].abs() < 0.3


def test_colour_histogram_puts_each_colour_into_its_cell(folder):
    features = colour_histogram(Manifest.from_folder(folder), threads=1)
    cells = [(r // 32 * 8 + g // 32) * 8 + b // 32 for r, g, b in COLOURS]
    assert features.argmax(dim=1).tolist() == cells
    torch.testing.assert_close((features**2).sum(dim=1), torch.ones(len(COLOURS)))


def test_colour_histogram_ignores_where_the_colours_are():
    images = torch.randn(2, 3, 8, 8)
    shuffled = images.flatten(2)[:, :, torch.randperm(64)].view_as(images)
    assert torch.equal(ColourHistogram()(images), ColourHistogram()(shuffled))
