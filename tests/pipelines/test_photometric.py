"""The photometric operations against torchvision's for uint8 tensors, in levels of 0..255."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

from unigrad_fast.pipelines import Manifest, graph, photometric, preset_views
from unigrad_fast.pipelines.parameters import sample
from unigrad_fast.pipelines.presets import DEVIATION, MEAN

JITTER = ("brightness", "contrast", "saturation", "hue")
OPERATIONS = ("jitter", "gray", "blur", "solarize", "flip")
VIEW = preset_views("simsiam")[0]
EVERYTHING = replace(VIEW, solarize_probability=0.3)


@pytest.fixture(scope="module")
def drawn():
    """Noise, single colours, and all hues at all saturations and values: uint8 [8, 40, 40, 3]."""
    random, side = np.random.default_rng(0), 40
    across, down = np.meshgrid(np.linspace(0, 1, side), np.linspace(0, 1, side))
    phases = 2 * np.pi * (across[..., None] + np.array([0, 1 / 3, 2 / 3]))
    sweeps = [127.5 * value * (1 + down[..., None] * np.cos(phases)) for value in (0.1, 0.6, 1.0)]
    flat = [np.full((side, side, 3), colour) for colour in ((0, 0, 0), (255, 255, 255), (255, 0, 3))]
    noise = random.integers(0, 256, (2, side, side, 3))
    return torch.from_numpy(np.stack([*noise, *sweeps, *flat]).astype(np.uint8))


@pytest.fixture(scope="module")
def photographed(photographs):
    """Real crops, uint8 [4, 224, 224, 3]."""
    images = [Image.open(path).convert("RGB") for path in sorted(photographs.iterdir())[:4]]
    return torch.from_numpy(np.stack([np.asarray(image.resize((224, 224))) for image in images]))


@pytest.fixture(scope="module", params=["drawn", "photographed"])
def crops(request):
    return request.getfixturevalue(request.param)


def draw(count, view=VIEW, seed=7, **fixed):
    """Parameters of so many images, some of them replaced by the given values."""
    drawn = sample(view, 0, seed, 0, np.arange(count), np.tile((500, 375), (count, 1)))
    kinds = {field.name: getattr(drawn, field.name).dtype for field in fields(drawn)}
    return replace(drawn, **{name: np.full(count, value, kinds[name]) for name, value in fixed.items()})


def only(operation, count, **fixed):
    """Parameters with one operation for all images; jitter that is not given leaves the image as it is."""
    neutral = dict(brightness=1, contrast=1, saturation=1, hue=0)
    return draw(count, **{**neutral, **{name: name == operation for name in OPERATIONS}, **fixed})


def levels(images):
    """The uint8 images [N, 3, S, S] that were normalised."""
    scaled = 255 * (images * torch.tensor(DEVIATION)[:, None, None] + torch.tensor(MEAN)[:, None, None])
    assert (scaled - scaled.round()).abs().max() < 1e-3
    return scaled.round().to(torch.uint8)


def apply(crops, parameters, view=VIEW):
    return levels(photometric.apply(view, crops, parameters))


def planar(crops):
    return crops.permute(0, 3, 1, 2).contiguous()


def adjust(image, operation, parameters, place):
    factor = float(getattr(parameters, operation)[place])
    return getattr(F, f"adjust_{operation}")(image, factor / 360 if operation == "hue" else factor)


def torchvisions(crops, p):
    """The whole chain, image by image."""
    images = []
    for place, image in enumerate(planar(crops)):
        if p.jitter[place]:
            for operation in photometric.ORDERS[p.order[place]]:
                image = adjust(image, JITTER[operation], p, place)
        if p.gray[place]:
            image = F.rgb_to_grayscale(image, num_output_channels=3)
        if p.blur[place]:
            image = F.gaussian_blur(image, [13, 13], [float(p.sigma[place])] * 2)
        if p.solarize[place]:
            image = F.solarize(image, 128)
        if p.flip[place]:
            image = F.horizontal_flip(image)
        images.append(image)
    return torch.stack(images)


def difference(ours, theirs):
    return (ours.int() - theirs.int()).abs()


@pytest.mark.parametrize("factor", [0.0, 0.6, 1.0, 1.37])
@pytest.mark.parametrize("operation", ["brightness", "contrast", "saturation"])
def test_factor_of_jitter_is_exact(crops, operation, factor):
    p = only("jitter", len(crops), **{operation: factor})
    theirs = [adjust(image, operation, p, place) for place, image in enumerate(planar(crops))]
    assert torch.equal(apply(crops, p), torch.stack(theirs))


@pytest.mark.parametrize("degrees", [-180, -36, -1e-6, 0, 13.3, 36, 120])  # -1e-6 rounds up to a full turn
def test_hue_is_exact(crops, degrees):
    p = only("jitter", len(crops), hue=degrees)
    theirs = [adjust(image, "hue", p, place) for place, image in enumerate(planar(crops))]
    assert torch.equal(apply(crops, p), torch.stack(theirs))


def test_hue_is_exact_for_a_grid_of_all_colours():
    steps = torch.cat([torch.arange(0, 256, 8), torch.tensor([1, 254, 255])]).to(torch.uint8)
    colours = torch.cartesian_prod(steps, steps, steps)[: 207**2].reshape(1, 207, 207, 3)
    p = only("jitter", 1, hue=-23.4)
    assert torch.equal(apply(colours, p)[0], adjust(planar(colours)[0], "hue", p, 0))


def test_gray_is_exact(crops):
    theirs = F.rgb_to_grayscale(planar(crops), num_output_channels=3)
    assert torch.equal(apply(crops, only("gray", len(crops))), theirs)


def test_solarize_is_exact(crops):
    assert torch.equal(apply(crops, only("solarize", len(crops))), F.solarize(planar(crops), 128))


def test_flip_is_exact(crops):
    assert torch.equal(apply(crops, only("flip", len(crops))), F.horizontal_flip(planar(crops)))


@pytest.mark.parametrize("sigma", [0.1, 0.7, 2.0])
def test_blur_is_exact_but_for_rare_roundings(crops, sigma):
    ours = apply(crops, only("blur", len(crops), sigma=sigma))
    apart = difference(ours, F.gaussian_blur(planar(crops), [13, 13], [sigma, sigma]))
    assert apart.max() <= 1
    assert apart.float().mean() < 1e-3


def test_blur_is_cut_where_a_larger_kernel_changes_no_more_than_a_level(photographed):
    ours = apply(photographed, only("blur", len(photographed), sigma=2.0))
    assert difference(ours, F.gaussian_blur(planar(photographed), [23, 23], [2.0, 2.0])).max() <= 1


def test_every_image_is_blurred_by_its_own_sigma(drawn):
    sigma = np.linspace(0.1, 2.0, len(drawn), dtype=np.float32)
    p = replace(only("blur", len(drawn)), sigma=sigma)
    assert difference(apply(drawn, p), torchvisions(drawn, p)).max() <= 1


def test_views_smaller_than_the_blur_reaches_are_blurred():
    one = torch.arange(4 * 4 * 3, dtype=torch.uint8).reshape(1, 4, 4, 3)
    theirs = F.gaussian_blur(planar(one), [7, 7], [2.0, 2.0])
    assert difference(apply(one, only("blur", 1, sigma=2.0)), theirs).max() <= 1


def test_all_orders_of_the_jitter_are_exact(crops):
    some = crops[torch.arange(24) % min(len(crops), 3)]
    p = replace(
        draw(24, gray=False, blur=False, flip=False, jitter=True), order=np.random.default_rng(0).permutation(24)
    )
    assert torch.equal(apply(some, p), torchvisions(some, p))


def test_orders_make_a_difference(drawn):
    p = replace(draw(24, brightness=1.4, contrast=0.6, saturation=1.4, hue=30, jitter=True), order=np.arange(24))
    p = replace(p, **{name: np.zeros(24, bool) for name in OPERATIONS[1:]})
    results = apply(drawn[2:3].expand(24, -1, -1, -1), p)
    assert len(results.flatten(1).unique(dim=0)) > 12


@pytest.mark.parametrize("seed", [0, 1])
def test_whole_chain_is_torchvisions(crops, seed):
    p = draw(len(crops), EVERYTHING, seed)
    assert p.jitter.any() and p.blur.any()
    apart = difference(apply(crops, p), torchvisions(crops, p))
    assert apart.max() <= 1
    assert apart.float().mean() < 1e-3


def test_normalisation_is_torchvisions(drawn):
    p = only("none", len(drawn))
    theirs = F.normalize(F.to_dtype(planar(drawn), torch.float32, scale=True), list(MEAN), list(DEVIATION))
    assert torch.allclose(photometric.apply(VIEW, drawn, p), theirs, atol=2e-6)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation_touches_only_the_images_it_is_meant_for(drawn, operation):
    count = len(drawn) - 3  # those that are not of one colour
    chosen = np.arange(count) % 2 == 1
    p = replace(draw(count, brightness=0.7), **{name: np.zeros(count, bool) for name in OPERATIONS})
    before = photometric.apply(VIEW, drawn[:count], p)
    after = photometric.apply(VIEW, drawn[:count], replace(p, **{operation: chosen}))
    same = (before == after).flatten(1).all(dim=1).numpy()
    assert np.array_equal(same, ~chosen)


def test_result_of_an_image_does_not_depend_on_its_batch(drawn):
    some = drawn[torch.arange(37) % len(drawn)]
    p = draw(len(some), EVERYTHING)
    together = photometric.apply(EVERYTHING, some, p)
    for place in range(len(some)):
        one = slice(place, place + 1)
        assert torch.equal(photometric.apply(EVERYTHING, some[one], p[one]), together[one])


def test_output_is_float32_and_channels_last_and_the_input_stays(drawn):
    kept = drawn.clone()
    images = photometric.apply(EVERYTHING, drawn, draw(len(drawn), EVERYTHING))
    assert images.dtype == torch.float32
    assert images.shape == (len(drawn), 3, *drawn.shape[1:3])
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(drawn, kept)


def test_mixed_precision_around_it_changes_nothing(drawn):
    p = draw(len(drawn), EVERYTHING, blur=True)
    expected = photometric.apply(EVERYTHING, drawn, p)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(photometric.apply(EVERYTHING, drawn, p), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_gpu_is_not_waited_for_and_differs_by_a_level_at_most(drawn):
    p = draw(len(drawn), EVERYTHING)
    on_gpu = drawn.cuda()
    photometric.apply(EVERYTHING, on_gpu, p)  # memory and libraries are set up
    torch.cuda.set_sync_debug_mode("error")
    try:
        images = photometric.apply(EVERYTHING, on_gpu, p)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert difference(levels(images.cpu()), apply(drawn, p, EVERYTHING)).max() <= 1


def test_orders_are_uniform_and_go_with_no_other_draw():
    count = 24_000
    p = draw(count)
    found = np.bincount(p.order, minlength=24)
    assert len(found) == 24
    assert np.abs(found - 1000).max() < 4.5 * np.sqrt(1000)
    for name in ("brightness", "hue", "sigma", "flip"):
        assert abs(np.corrcoef(p.order, getattr(p, name))[0, 1]) < 4.5 / np.sqrt(count)


@pytest.mark.parametrize("folder", ["pictures", "photographs"])
@pytest.mark.parametrize("name", ["simsiam", "byol"])
def test_dalis_path_is_close(request, tmp_path_factory, name, folder):
    manifest = Manifest.from_folder(request.getfixturevalue(folder), cache=tmp_path_factory.mktemp("cache"))
    index = np.arange(min(16, len(manifest)))
    view = preset_views(name)[-1]
    drawn = sample(view, 1, 0, 0, index, manifest.sizes[index])
    crops = dalis(manifest, index, view, drawn, colours=False)
    # Hue in DALI keeps the luma and not the largest channel; measured: up to 4.2 levels with it, 1.2 without.
    for p, most in ((drawn, 5), (replace(drawn, hue=np.zeros_like(drawn.hue)), 2)):
        apart = photometric.apply(view, crops, p) - dalis(manifest, index, view, p).permute(0, 3, 1, 2)
        assert (255 * apart.abs() * torch.tensor(DEVIATION)[:, None, None]).mean() < most


def dalis(manifest, index, view, parameters, colours=True):
    """The graph's view of some images, [N, S, S, 3]: fp32 and normalised, or uint8 crops without colours."""
    encoded = [np.frombuffer(manifest.read(i), np.uint8) for i in index.tolist()]
    fed = [encoded, *graph.feed(view, parameters, colours)]
    pipeline = graph.build((view,), len(index), lambda info: fed, threads=1, prefetch=1, colours=colours)
    return torch.from_dlpack(pipeline.run()[0].as_tensor()).clone()
