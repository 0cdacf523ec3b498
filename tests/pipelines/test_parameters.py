from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import v2

from unigrad_fast.pipelines import DataError, View, preset_views
from unigrad_fast.pipelines.parameters import sample

VIEW = preset_views("simsiam")[0]
DRAWS = 5000


def draw(view=VIEW, count=DRAWS, size=(500, 375), seed=0, epoch=0, number=0):
    return sample(view, number, seed, epoch, np.arange(count), np.tile(size, (count, 1)))


def distance(left, right):
    """Kolmogorov-Smirnov distance of two samples."""
    places = np.sort(np.concatenate([left, right]))
    shares = [np.searchsorted(np.sort(part), places, side="right") / len(part) for part in (left, right)]
    return np.abs(shares[0] - shares[1]).max()


def assert_same_distribution(ours, reference):
    n, m = len(ours), len(reference)
    assert distance(np.asarray(ours, float), np.asarray(reference, float)) < 1.95 * np.sqrt((n + m) / (n * m))


@pytest.mark.parametrize("size", [(500, 375), (40, 200), (32, 32)])
@pytest.mark.parametrize("scale", [(0.2, 1.0), (0.05, 0.14)])
def test_crops_are_distributed_as_torchvisions(size, scale):
    ours = draw(replace(VIEW, scale=scale), size=size)
    torch.manual_seed(0)
    image = torch.empty(3, size[1], size[0])
    crop = v2.RandomResizedCrop(224, scale=scale, ratio=VIEW.ratio)
    theirs = [crop.make_params([image]) for _ in range(DRAWS)]
    top, left, height, width = (np.array([p[key] for p in theirs]) for key in ("top", "left", "height", "width"))
    assert_same_distribution(ours.width * ours.height, width * height)
    assert_same_distribution(ours.width / ours.height, width / height)
    assert_same_distribution(ours.x, left)
    assert_same_distribution(ours.y, top)


def test_jitter_is_distributed_as_torchvisions():
    torch.manual_seed(0)
    jitter = v2.ColorJitter(0.4, 0.4, 0.4, 0.1)
    theirs = [jitter.make_params([]) for _ in range(DRAWS)]
    ours = draw()
    for name in ("brightness", "contrast", "saturation"):
        assert_same_distribution(getattr(ours, name), [p[f"{name}_factor"] for p in theirs])
    assert_same_distribution(ours.hue / 360, [p["hue_factor"] for p in theirs])


def test_blur_is_distributed_as_torchvisions():
    torch.manual_seed(0)
    blur = v2.GaussianBlur(23, sigma=VIEW.blur_sigma)
    assert_same_distribution(draw().sigma, [blur.make_params([])["sigma"][0] for _ in range(DRAWS)])


@pytest.mark.parametrize("name", ["jitter", "gray", "blur", "solarize", "flip"])
@pytest.mark.parametrize("probability", [0.0, 0.2, 1.0])
def test_operations_apply_as_often_as_asked(name, probability):
    share = getattr(draw(replace(VIEW, **{f"{name}_probability": probability})), name).mean()
    assert abs(share - probability) <= 4 * np.sqrt(probability * (1 - probability) / DRAWS)


def numbers(parameters):
    """All numbers that vary freely, [kinds, N]."""
    names = ("x", "y", "width", "brightness", "contrast", "saturation", "hue", "sigma")
    return np.stack([getattr(parameters, name).astype(float) for name in names])


def test_draws_of_one_image_are_uncorrelated():
    p = draw(size=(3000, 3000), view=replace(VIEW, scale=(0.2, 0.3)))  # small enough for the first try to fit
    rows = numbers(p)
    rows[0], rows[1] = p.x / (3000 - p.width), p.y / (3000 - p.height)
    correlation = np.corrcoef(rows)
    assert np.abs(correlation - np.eye(len(correlation))).max() < 4.5 / np.sqrt(DRAWS)


@pytest.mark.parametrize("other", [dict(seed=1), dict(seed=1 << 32), dict(epoch=1), dict(number=1)])
def test_seeds_epochs_and_views_share_no_randomness(other):
    first, second = numbers(draw()), numbers(draw(**other))
    for left, right in zip(first, second, strict=True):
        assert abs(np.corrcoef(left, right)[0, 1]) < 4.5 / np.sqrt(DRAWS)
    assert (first[3:] == second[3:]).mean() < 0.01


def test_images_share_no_randomness():
    factors = draw().brightness
    assert len(np.unique(factors)) > 0.99 * DRAWS
    assert abs(np.corrcoef(factors[1:], factors[:-1])[0, 1]) < 4.5 / np.sqrt(DRAWS)


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=20), st.integers(0, 2**64 - 1), st.integers(0, 10**5))
def test_parameters_of_an_image_do_not_depend_on_its_batch(index, seed, epoch):
    index = np.array(index)
    sizes = np.stack([index % 700 + 1, index % 333 + 1], axis=1)
    together = sample(VIEW, 1, seed, epoch, index, sizes)
    alone = [sample(VIEW, 1, seed, epoch, index[[i]], sizes[[i]]) for i in range(len(index))]
    for field in fields(together):
        separate = np.concatenate([getattr(parameters, field.name) for parameters in alone])
        assert np.array_equal(getattr(together, field.name), separate)


sides = st.integers(1, 6000)


@given(sides, sides, st.floats(0.001, 1), st.floats(0.001, 1), st.integers(0, 2**32))
def test_crop_lies_inside_the_image(width, height, low, high, seed):
    view = View(scale=(min(low, high), max(low, high)))
    p = draw(view, count=30, size=(width, height), seed=seed)
    assert (p.width > 0).all() and (p.height > 0).all() and (p.x >= 0).all() and (p.y >= 0).all()
    assert (p.x + p.width <= width).all() and (p.y + p.height <= height).all()


@given(sides, sides)
def test_image_that_no_box_fits_gives_torchvisions_central_crop(width, height):
    view = View(scale=(1.0, 1.0), ratio=(0.9, 1.1))
    if 0.85 < width / height < 1.15 or min(width, height) < 20:
        return  # rounding may let a box fit
    p = draw(view, count=1, size=(width, height))
    reference = v2.RandomResizedCrop(8, scale=view.scale, ratio=view.ratio)
    image = torch.empty(1, 1, 1).expand(1, height, width)
    expected = reference.make_params([image])
    found = dict(top=int(p.y[0]), left=int(p.x[0]), height=int(p.height[0]), width=int(p.width[0]))
    assert found == {key: expected[key] for key in found}


@given(st.floats(0, 2), st.floats(0, 2), st.floats(0, 2), st.floats(-180, 180))
def test_colour_matrix_keeps_gray_gray_and_scales_luma(brightness, contrast, saturation, hue):
    p = draw(count=1)
    p = replace(
        p,
        **{
            k: np.float32([v])
            for k, v in dict(brightness=brightness, contrast=contrast, saturation=saturation, hue=hue).items()
        },
    )
    matrix = p.colour_matrix()[0].astype(float)
    assert np.allclose(matrix @ np.ones(3), brightness * contrast, atol=1e-5)
    assert np.allclose(
        [0.299, 0.587, 0.114] @ matrix, brightness * contrast * np.array([0.299, 0.587, 0.114]), atol=1e-5
    )


@pytest.mark.parametrize(
    "wrong",
    [
        dict(scale=(0.0, 1.0)),
        dict(scale=(0.5, 0.2)),
        dict(scale=(0.5, 1.5)),
        dict(ratio=(2.0, 1.0)),
        dict(blur_sigma=(0.0, 1.0)),
        dict(flip_probability=1.5),
        dict(interpolation="nearest"),
        dict(jitter=(0.4, 0.4, 0.4, 0.6)),
        dict(image_size=0),
        dict(colour=1),
    ],
)
def test_wrong_view_is_refused(wrong):
    with pytest.raises(DataError):
        preset_views("simsiam", **wrong)


def test_unknown_preset_names_the_known_ones():
    with pytest.raises(DataError, match="use one of simsiam"):
        preset_views("simclr")
