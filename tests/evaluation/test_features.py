"""Features and baselines from real JPEG files through the real loader."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn

from unigrad_fast.evaluation import features as features_module
from unigrad_fast.evaluation.baselines import BASELINES, ColourHistogram, RawPixels
from unigrad_fast.evaluation.features import LeftOut
from unigrad_fast.pipelines import EvaluationLoader, Failure, Manifest
from unigrad_fast.runtime.errors import RunStopped

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


def extract(
    backbone: nn.Module, manifest: Manifest, autocast_dtype=None, max_bad_fraction: float = 0.0, **settings
) -> tuple[torch.Tensor, LeftOut]:
    """What the backbone makes of a rank's share of the images."""
    loader = EvaluationLoader(manifest, **({"image_size": 16, "batch_size": 2, "threads": 1} | settings))
    return features_module.extract(backbone, loader, torch.device("cpu"), autocast_dtype, max_bad_fraction)


def expected_colours() -> torch.Tensor:
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (torch.tensor(COLOURS) / 255 - mean) / deviation


def test_features_come_in_manifest_order(folder):
    backbone = MeanColour()
    features, left_out = extract(backbone, Manifest.from_folder(folder))
    torch.testing.assert_close(features, expected_colours(), atol=0.05, rtol=0)
    assert [count for count, _, _ in backbone.calls] == [2, 2, 1]
    assert left_out.count == 0 and left_out.told("training") == []


def test_backbone_is_evaluated_without_gradient_and_left_as_it_was(folder):
    backbone = nn.Sequential(MeanColour(), nn.Dropout(), nn.Linear(3, 4)).train()
    backbone[1].eval()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    features, _ = extract(backbone, Manifest.from_folder(folder))
    assert {(training, gradient) for _, training, gradient in backbone[0].calls} == {(False, False)}
    assert [module.training for module in backbone.modules()] == [True, True, True, False, True]
    assert not features.requires_grad
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_autocast_computes_in_the_given_type_and_returns_fp32(folder):
    seen = []
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4))
    backbone.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    features, _ = extract(backbone, Manifest.from_folder(folder), autocast_dtype=torch.bfloat16)
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
        extract(backbone, Manifest.from_folder(folder))
    assert backbone.training


def listed_before_damage(folder: Path, *damaged: str) -> Manifest:
    """The manifest of whole files, some of which are cut off among their pixels afterwards."""
    manifest = Manifest.from_folder(folder)
    for name in damaged:
        path = folder / name
        content = path.read_bytes()
        path.write_bytes(content[: (content.rindex(b"\xff\xda") + len(content)) // 2])
    return manifest


def test_images_that_cannot_be_used_are_left_out_of_features(folder):
    manifest = listed_before_damage(folder, "a/0.jpg", "b/3.jpg")
    features, left_out = extract(MeanColour(), manifest, max_bad_fraction=0.4)
    torch.testing.assert_close(features, expected_colours()[[1, 2, 4]], atol=0.05, rtol=0)
    assert (left_out.count, left_out.images, left_out.first.image) == (2, 5, 0)
    (line,) = left_out.told("training")
    start = f"2 of 5 training images could not be used and were left out, first {folder}/a/0.jpg: "
    assert line.startswith(start) and len(line) > len(start)


def test_a_line_on_images_left_out_is_text_whatever_their_names():
    first = Failure(step=0, image=3, path="/x/\udcff.jpg", reason="cut off")
    (line,) = LeftOut(1, 1200, first).told("validation")
    assert line == "1 of 1,200 validation images could not be used and was left out, /x/\ufffd.jpg: cut off"


def test_more_unusable_images_than_allowed_stop_with_the_first_and_the_remedy(folder):
    manifest = listed_before_damage(folder, "a/2.jpg", "b/3.jpg")
    with pytest.raises(RunStopped) as stopped:
        extract(MeanColour(), manifest, max_bad_fraction=0.3)
    start = f"2 of 5 images cannot be used, more than data.max_bad_fraction = 0.3 allows, first {folder}/a/2.jpg: "
    assert str(stopped.value).startswith(start) and "`unigrad-fast data scan`" in str(stopped.value)


def test_without_any_usable_image_there_are_no_features(folder):
    manifest = listed_before_damage(folder, *(f"{'a' if number < 3 else 'b'}/{number}.jpg" for number in range(5)))
    with pytest.raises(RunStopped, match=r"^5 of 5 images cannot be used, first .*a/0\.jpg: "):
        extract(MeanColour(), manifest, max_bad_fraction=1.0)


def are_the_rows(features: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether each of the expected rows is among the features, and no other is."""
    close = (features[:, None] - expected).abs().amax(dim=2) < 0.05
    return len(features) == len(expected) and bool(close.any(dim=0).all())


def damaged_share_of_two(folder: Path) -> dict:
    """On one of two ranks: what `extract` gives where one image is bad, and where that is too many."""
    manifest = Manifest.from_folder(folder)
    shared = {"rank": dist.get_rank(), "world_size": 2}
    made = extract(MeanColour(), manifest, **shared, max_bad_fraction=0.2)
    with pytest.raises(RunStopped) as stopped:
        extract(MeanColour(), manifest, **shared, max_bad_fraction=0.1)
    return {"made": made, "message": str(stopped.value)}


@pytest.mark.parametrize("bad", [0, 1])
def test_an_image_that_one_rank_cannot_use_is_left_out_on_both(folder, workers, bad):
    listed_before_damage(folder, f"a/{bad}.jpg")
    kept = [number for number in range(5) if number != bad]
    results = workers(2).run(damaged_share_of_two, folder)
    features, left_out = zip(*(result["made"] for result in results), strict=True)
    assert are_the_rows(torch.cat(features), expected_colours()[kept])
    for each in left_out:
        assert each.count == 1 and each.first.path == str(folder / f"a/{bad}.jpg")
    assert results[0]["message"] == results[1]["message"]
    assert results[0]["message"].startswith("1 of 5 images cannot be used, more than data.max_bad_fraction = 0.1")


def share_of_two(folder: Path, single: Path) -> dict:
    """On one of two ranks: what `extract` gives for five images, for one, and for a non-finite feature."""
    shared = {"rank": dist.get_rank(), "world_size": 2}
    backbone = MeanColour()
    five = extract(backbone, Manifest.from_folder(folder), **shared)[0]
    one = extract(MeanColour(), Manifest.from_folder(single), **shared)[0]
    with pytest.raises(RunStopped) as stopped:
        extract(NonFiniteForGreen(), Manifest.from_folder(folder), **shared)
    images = sum(count for count, _, _ in backbone.calls)
    return {"five": five, "images": images, "one": one, "message": str(stopped.value)}


def test_two_ranks_share_the_images(folder, tmp_path, workers):
    (tmp_path / "single/a").mkdir(parents=True)
    Image.new("RGB", (20, 20), COLOURS[0]).save(tmp_path / "single/a/0.jpg", quality=95)
    results = workers(2).run(share_of_two, folder, tmp_path / "single")
    assert sorted(result["images"] for result in results) == [2, 3]
    assert are_the_rows(torch.cat([result["five"] for result in results]), expected_colours())
    assert are_the_rows(torch.cat([result["one"] for result in results]), expected_colours()[:1])
    for result in results:
        assert "a/1.jpg" in result["message"]


def test_raw_pixels_are_standardised_per_image():
    images = torch.randn(3, 3, 8, 8)
    features = RawPixels()(images)
    torch.testing.assert_close(features.std(dim=1), torch.ones(3))
    torch.testing.assert_close(RawPixels()(2 * images + 1), features)
    assert RawPixels()(torch.ones(1, 3, 8, 8)).abs().max() == 0


def baseline(name: str, folder: Path) -> torch.Tensor:
    module, size = BASELINES[name]
    return extract(module, Manifest.from_folder(folder), image_size=size, crop_fraction=1.0)[0]


def test_raw_pixels_of_files_correlate_with_the_same_picture_only(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "a").mkdir()
    for number in range(2):
        picture = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(picture).resize((48, 48)).save(tmp_path / f"a/{number}_dark.jpg", quality=95)
        brighter = Image.fromarray((picture // 2 + 100).astype(np.uint8)).resize((64, 64))
        brighter.save(tmp_path / f"a/{number}_light.jpg", quality=95)
    features = torch.nn.functional.normalize(baseline("raw pixels", tmp_path))
    assert features.shape == (4, 3 * 32 * 32)
    similarity = features @ features.T
    assert similarity[0, 1] > 0.9 and similarity[2, 3] > 0.9
    assert similarity[0, 2].abs() < 0.3


def test_colour_histogram_puts_each_colour_into_its_cell(folder):
    features = baseline("colour histogram", folder)
    cells = [(r // 32 * 8 + g // 32) * 8 + b // 32 for r, g, b in COLOURS]
    assert features.argmax(dim=1).tolist() == cells
    torch.testing.assert_close((features**2).sum(dim=1), torch.ones(len(COLOURS)))


def test_colour_histogram_ignores_where_the_colours_are():
    images = torch.randn(2, 3, 8, 8)
    shuffled = images.flatten(2)[:, :, torch.randperm(64)].view_as(images)
    assert torch.equal(ColourHistogram()(images), ColourHistogram()(shuffled))


def test_a_cpu_takes_a_few_images_at_a_time(monkeypatch):
    seen = []

    class Means(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            seen.append(len(images))
            return images.mean((2, 3))

    images = torch.randn(7, 3, 4, 4)
    monkeypatch.setattr(features_module, "PIXELS", 3 * 16 + 5)
    assert torch.equal(features_module.in_parts(Means(), images), images.mean((2, 3))) and seen == [3, 3, 1]
    monkeypatch.setattr(features_module, "PIXELS", 1)
    assert torch.equal(features_module.in_parts(Means(), images), images.mean((2, 3))) and seen[3:] == [1] * 7
