"""The graph, and what takes its place on a CPU, against torchvision with the same parameters, in levels of 0..255."""

import math
from dataclasses import fields, replace
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from unigrad_fast.pipelines import Manifest, View, crops, graph, preset_views
from unigrad_fast.pipelines.parameters import sample
from unigrad_fast.pipelines.presets import DEVIATION, MEAN

pytestmark = pytest.mark.long
OFF = ("jitter_probability", "gray_probability", "blur_probability", "flip_probability")
PLAIN = preset_views("simsiam", **dict.fromkeys(OFF, 0.0))[0]


class Images(NamedTuple):
    manifest: Manifest
    index: np.ndarray
    path: str  # "graph" or "crops"


@pytest.fixture(
    scope="module", params=product(["pictures", "photographs"], ["graph", "crops"]), ids=lambda pair: "-".join(pair)
)
def images(request, tmp_path_factory):
    """Drawn and real images, at most eight, and one of the two paths."""
    root, path = request.param
    manifest = Manifest.open(request.getfixturevalue(root), cache=tmp_path_factory.mktemp("cache"))
    return Images(manifest, np.arange(min(8, len(manifest))), path)


def draw(images, view, **fixed):
    """Parameters of a view, some of them replaced by one value for all images."""
    manifest, index, _ = images
    drawn = sample(view, 0, 7, 0, index, manifest.sizes[index])
    kinds = {field.name: getattr(drawn, field.name).dtype for field in fields(drawn)}
    return replace(drawn, **{name: np.full(len(index), value, kinds[name]) for name, value in fixed.items()})


def run(images, view, parameters):
    """A path's output on the scale 0..255: fp32 [N, 3, S, S]."""
    manifest, index, path = images
    data = [np.frombuffer(manifest.read(i), np.uint8) for i in index.tolist()]
    for operation in ("jitter", "gray", "blur", "solarize"):
        if not getattr(view, f"{operation}_probability"):
            parameters = replace(parameters, **{operation: np.zeros(len(index), bool)})
    if path == "graph":
        views, shapes = graph.build(
            (view,), len(index), lambda info: [data, *graph.feed(view, parameters)], threads=1, prefetch=1
        ).run()
        views = torch.from_dlpack(views.as_tensor()).clone()
    else:
        decoded, shapes = graph.build_decoder(lambda info: [data], batch_size=len(index)).run()
        crop = torch.empty(len(index), view.size, view.size, 3, dtype=torch.uint8)
        crops.crop_and_resize([torch.from_dlpack(image) for image in decoded], view, parameters, crop)
        views = torch.empty(crop.shape)
        crops.recolour(view, crop, parameters, views)
    assert np.array_equal(np.asarray(shapes.as_tensor())[:, 1::-1], manifest.sizes[index])
    return 255 * (views * torch.tensor(DEVIATION) + torch.tensor(MEAN)).permute(0, 3, 1, 2)


def levels(views):
    """The nearest uint8 images; `crops` rounds nothing before."""
    return views.round().to(torch.uint8)


def difference(ours, theirs):
    return (ours.float() - theirs.float()).abs()


def with_only(operation, **change):
    return replace(PLAIN, **{f"{operation}_probability": 1.0}, **change)


def before_and_after(images, view, **fixed):
    """The same crops without and with the one operation of a view."""
    parameters = draw(images, view, **fixed)
    plain = replace(parameters, flip=np.zeros_like(parameters.flip))
    return levels(run(images, PLAIN, plain)), levels(run(images, view, parameters)), parameters


def original(images, place):
    manifest, index, _ = images
    with Image.open(manifest.path(int(index[place]))) as image:
        return image.convert("RGB")


def test_decoding_is_exact(images):
    manifest, index, _ = images
    for place in range(min(4, len(index))):
        one = images._replace(index=index[place : place + 1])
        width, height = manifest.sizes[index[place]].tolist()
        side = min(width, height)
        view = replace(PLAIN, size=side)
        ours = run(one, view, draw(one, view, x=0, y=0, width=side, height=side))
        theirs = F.pil_to_tensor(original(images, place))[:, :side, :side]
        assert torch.equal(levels(ours)[0], theirs)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_crop_and_resize(images, interpolation):
    view = replace(PLAIN, interpolation=interpolation)
    p = draw(images, view)
    ours = run(images, view, p)
    mode = InterpolationMode.BILINEAR if interpolation == "bilinear" else InterpolationMode.BICUBIC
    theirs = torch.stack(
        [
            F.pil_to_tensor(F.resized_crop(original(images, i), *box, [view.size, view.size], mode, antialias=True))
            for i, box in enumerate(zip(*(a.tolist() for a in (p.y, p.x, p.height, p.width)), strict=True))
        ]
    )
    apart = difference(ours, theirs)
    assert apart.mean() < 0.3
    assert (apart <= 1.01).float().mean() >= 0.99
    assert apart.max() <= 10.01


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.4])
@pytest.mark.parametrize("operation, bound", [("brightness", 2), ("contrast", 1), ("saturation", 2)])
def test_jitter_of_one_kind(images, operation, bound, factor):
    neutral = dict(brightness=1.0, contrast=1.0, saturation=1.0, hue=0.0)
    before, after, _ = before_and_after(images, with_only("jitter"), **{**neutral, operation: factor})
    adjust = getattr(F, f"adjust_{operation}")
    assert difference(after, torch.stack([adjust(image, factor) for image in before])).max() <= bound


def test_joint_jitter_is_close_to_torchvisions_one_by_one(images):
    before, after, p = before_and_after(images, with_only("jitter"), hue=0.0)
    theirs = before
    for operation in ("saturation", "contrast", "brightness"):
        factors = getattr(p, operation).tolist()
        adjust = getattr(F, f"adjust_{operation}")
        theirs = torch.stack([adjust(image, factor) for image, factor in zip(theirs, factors, strict=True)])
    # torchvision clamps to 0..255 between the operations, the graph once at the end.
    assert difference(after, theirs).mean() < 2


@pytest.mark.parametrize("degrees", [-36, 18, 36])
def test_hue_turns_by_the_angle_and_keeps_luma(images, degrees):
    neutral = dict(brightness=1.0, contrast=1.0, saturation=1.0)
    before, after, _ = before_and_after(images, with_only("jitter"), hue=degrees, **neutral)
    safe = ((after > 0) & (after < 255)).all(dim=1)  # not clamped
    weights = torch.tensor([0.299, 0.587, 0.114])
    luma = [(image.float() * weights[:, None, None]).sum(dim=1)[safe] for image in (before, after)]
    assert difference(*luma).max() <= 1
    angles = [hue_and_chroma(image) for image in (before, after)]
    colourful = safe & (angles[0][1] > 30)
    turned = (angles[1][0] - angles[0][0] - degrees + 180) % 360 - 180
    assert turned[colourful].abs().mean() < 2


def hue_and_chroma(images):
    """Hue in degrees, as HSV has it, and the difference of the largest and smallest channel."""
    red, green, blue = images.float().unbind(dim=1)
    most, least = images.float().amax(dim=1), images.float().amin(dim=1)
    chroma = (most - least).clamp(min=1)
    sector = torch.where(
        most == red,
        (green - blue) / chroma,
        torch.where(most == green, (blue - red) / chroma + 2, (red - green) / chroma + 4),
    )
    return 60 * sector % 360, most - least


def test_gray(images):
    before, after, _ = before_and_after(images, with_only("gray"))
    assert difference(after, F.rgb_to_grayscale(before, num_output_channels=3)).max() <= 2


@pytest.mark.parametrize("sigma", [0.1, 0.7, 2.0])
def test_blur(images, sigma):
    before, after, _ = before_and_after(images, with_only("blur"), sigma=sigma)
    window = 2 * math.ceil(3 * sigma) + 1
    assert difference(after, F.gaussian_blur(before, [window, window], [sigma, sigma])).max() <= 1


def test_solarize_is_exact(images):
    before, after, _ = before_and_after(images, with_only("solarize"))
    assert torch.equal(after, F.solarize(before, 128))


def test_flip_is_exact(images):
    before, after, _ = before_and_after(images, with_only("flip"))
    assert torch.equal(after, F.horizontal_flip(before))


@pytest.mark.parametrize("operation", ["jitter", "gray", "blur", "solarize", "flip"])
def test_operation_touches_only_the_images_it_is_meant_for(images, operation):
    view = with_only(operation)
    p = draw(images, view, sigma=1.0)
    chosen = np.arange(len(images[1])) % 2 == 0
    before = run(images, PLAIN, replace(p, flip=np.zeros_like(p.flip)))
    after = run(images, view, replace(p, **{operation: chosen}))
    same = (before == after).flatten(1).all(dim=1).numpy()
    assert np.array_equal(same, ~chosen)


def test_operations_come_in_torchvisions_order(images):
    view = replace(PLAIN, gray_probability=1.0, blur_probability=1.0, solarize_probability=1.0)
    before, after, _ = before_and_after(images, view, sigma=1.0)
    theirs = F.gaussian_blur(F.rgb_to_grayscale(before, num_output_channels=3), [7, 7], [1.0, 1.0])
    near_threshold = (theirs.float() - 128).abs() <= 3  # where one level decides
    apart = difference(after, F.solarize(theirs, 128))
    assert apart[~near_threshold].max() <= 3


def test_views_of_several_sizes_come_from_one_decoding(images):
    manifest, index, _ = images
    views = (View(), View(size=96, scale=(0.05, 0.14), solarize_probability=0.2))
    data = [np.frombuffer(manifest.read(i), np.uint8) for i in index.tolist()]
    parameters = [sample(view, n, 0, 0, index, manifest.sizes[index]) for n, view in enumerate(views)]

    def source(info):
        fed = [graph.feed(view, p) for view, p in zip(views, parameters, strict=True)]
        return [data, *fed[0], *fed[1]]

    *outputs, _ = graph.build(views, len(index), source, threads=1, prefetch=1).run()
    assert [output.as_tensor().shape()[1:] for output in outputs] == [[224, 224, 3], [96, 96, 3]]
