"""The preset that a linear classifier is trained on: one view, cropped and flipped, and nothing else."""

import numpy as np
import pytest
import torch
from PIL import Image

from unigrad_fast.config import resolve
from unigrad_fast.pipelines import Loader, Manifest, preset_views
from unigrad_fast.pipelines.graph import inputs
from unigrad_fast.pipelines.parameters import sample
from unigrad_fast.pipelines.presets import DEVIATION, MEAN
from unigrad_fast.runtime.errors import UserError

COLOURS = [(220, 60, 40), (40, 200, 90), (60, 80, 210), (200, 180, 50)]


@pytest.fixture
def halves(tmp_path):
    """One image per class; its left half is black, its right half the class's colour."""
    for number, colour in enumerate(COLOURS):
        pixels = np.zeros((48, 64, 3), np.uint8)
        pixels[:, 32:] = colour
        (tmp_path / f"class{number}").mkdir()
        Image.fromarray(pixels).save(tmp_path / f"class{number}" / "0.png")
    return Manifest.from_folder(tmp_path)


def loader(manifest, batch_size=12, **options):
    return Loader(manifest, preset="linear", batch_size=batch_size, image_size=32, threads=1, **options)


def test_crops_take_8_to_100_percent_of_the_area_and_half_are_flipped():
    (view,) = preset_views("linear")
    drawn = sample(view, 0, 0, 0, np.arange(5000), np.tile((500, 500), (5000, 1)))
    share = drawn.width * drawn.height / 500**2
    assert 0.079 < share.min() < 0.1 and 0.9 < share.max() <= 1
    assert abs(drawn.flip.mean() - 0.5) < 0.03
    assert inputs(view) == ("start", "shape", "size", "flip")


def test_colours_stay_as_they_are_and_labels_fit(halves):
    scale = torch.tensor(DEVIATION).view(3, 1, 1), torch.tensor(MEAN).view(3, 1, 1)
    sides = set()
    for batch in loader(halves, batch_size=4, scale=(1.0, 1.0), ratio=(4 / 3, 4 / 3)).iterate(0, 8):
        (view,) = batch.views
        assert view.shape == (4, 3, 32, 32) and view.dtype == torch.float32
        for image, label in zip(view, batch.label.tolist(), strict=True):
            pixels = 255 * (image * scale[0] + scale[1])
            left, right = pixels[:, 16, 4], pixels[:, 16, 27]
            flipped = bool(left.sum() > right.sum())
            sides.add(flipped)
            bright, dark = (left, right) if flipped else (right, left)
            assert (bright - torch.tensor(COLOURS[label])).abs().max() < 2 and dark.abs().max() < 2
    assert sides == {False, True}


def test_a_step_is_bitwise_the_same_again_and_on_three_ranks(manifest):
    first, again = (next(loader(manifest).iterate(9)) for _ in range(2))
    ranks = [next(loader(manifest, rank=rank, world_size=3).iterate(9)) for rank in range(3)]
    assert torch.equal(first.views[0], again.views[0])
    assert torch.equal(first.views[0], torch.cat([batch.views[0] for batch in ranks]))
    assert torch.equal(first.label, torch.cat([batch.label for batch in ranks]))
    assert first.label.tolist() == manifest.labels[first.index.numpy()].tolist()
    assert not torch.equal(first.views[0], next(loader(manifest).iterate(10)).views[0])


def test_pretraining_does_not_take_it():
    with pytest.raises(UserError, match=r"data\.preset = linear"):
        resolve("imagenet_100ep", {"data": {"preset": "linear"}})
